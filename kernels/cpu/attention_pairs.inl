// Operands of bfloat16 in pairs, as AVX512_BF16 and AMX multiply them. Included by each set of kernels
// inside its own namespace, behind vectors.inl.

struct Pairs {
  using Source = std::uint16_t;
  using Left = std::uint16_t;
  using Right = std::uint16_t;
  static constexpr std::int64_t kDepth = 2;
  static constexpr bool kRough = true;

  static Right packed(Source number) { return number; }
  static void put_words(Four words, Right* to) { std::memcpy(to, &words, sizeof(words)); }

  static void pack_query(const Source* query, std::int64_t size, Left* to) {
    std::memcpy(to, query, static_cast<std::size_t>(size) * sizeof(Left));
  }

  // Two tokens': a number of the one, then that of the other.
  static void pack_values(const Source* const* values, std::int64_t size, Right* to) {
    std::int64_t at = 0;
    for (; at + kLanes <= size; at += kLanes) {
      const auto first = reinterpret_cast<Bits>(widened(load<Halves>(values[0] + at)));
      const auto second = reinterpret_cast<Bits>(widened(load<Halves>(values[1] + at)));
      const Bits both = first >> 16 | second;
      std::memcpy(to + 2 * at, &both, sizeof(both));
    }
    for (; at < size; ++at) {
      to[2 * at] = values[0][at];
      to[2 * at + 1] = values[1][at];
    }
  }

  static void put_weights(Vector first, Vector second, Left* to) {
    const __m512bh numbers = _mm512_cvtne2ps_pbh(second, first);
    std::memcpy(to, &numbers, sizeof(numbers));
  }
};

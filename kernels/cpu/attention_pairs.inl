// Operands of bfloat16 in pairs, as AVX512_BF16 and AMX multiply them. Included by each set of kernels
// inside its own namespace, behind attention.inl.

struct Pairs : PairedSource {
  using Left = std::uint16_t;
  static constexpr bool kRough = true;

  static void pack_query(const Source* query, std::int64_t size, Left* to) {
    std::memcpy(to, query, static_cast<std::size_t>(size) * sizeof(Left));
  }

  static void put_weights(Vector first, Vector second, Left* to) {
    const __m512bh numbers = _mm512_cvtne2ps_pbh(second, first);
    std::memcpy(to, &numbers, sizeof(numbers));
  }
};

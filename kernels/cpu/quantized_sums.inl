// How the sum of a group's products is added to those of the groups before it. Included by each set of
// kernels inside its own namespace, after panel_store.inl: what computes the integers of one group may
// be chosen by the number of rows, for they are exact, and this is the same.

// Finite float16 as float32; Words and Some are vectors of as many integers of 32 and 16 bits.
template <typename Numbers, typename Words, typename Some>
inline Numbers from_halves(const std::byte* halves) {
#if defined(__AVX512F__)
  return reinterpret_cast<Numbers>(_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(halves)));
#elif defined(__F16C__)
  return reinterpret_cast<Numbers>(_mm256_cvtph_ps(load<__m128i>(halves)));
#else
  const Words bits = __builtin_convertvector(load<Some>(halves), Words);
  // The exponent of a float32 is biased by 112 more; so a float16 below the normal ones is right too.
  const Numbers size = reinterpret_cast<Numbers>((bits & 0x7fffU) << 13) * 0x1p112f;
  return reinterpret_cast<Numbers>(reinterpret_cast<Words>(size) | (bits & 0x8000U) << 16);
#endif
}

// Of a group of the panel's 32 rows.
template <typename Kind>
struct Scales {
  explicit Scales(const std::byte* group) {
    const std::byte* halves = group + kNumbersBytes<Kind>;
    low = from_halves<Floats, Bits, Halves>(halves);
    high = from_halves<Floats, Bits, Halves>(halves + 32);
    if constexpr (Kind::kMinima) {
      least_low = from_halves<Floats, Bits, Halves>(halves + 64);
      least_high = from_halves<Floats, Bits, Halves>(halves + 96);
    }
  }

  // dots: of the group with a row of activations that has this scale, and its numbers this sum.
  void add(Sums& sums, const Sums& dots, float scale, std::int32_t sum) const {
    const Floats all = all_of(scale);
    sums.low += dots.low * (low * all);
    sums.high += dots.high * (high * all);
    if constexpr (Kind::kMinima) {
      const Floats size = all_of(scale * static_cast<float>(sum));
      sums.low += least_low * size;
      sums.high += least_high * size;
    }
  }

  Floats low, high, least_low, least_high;
};

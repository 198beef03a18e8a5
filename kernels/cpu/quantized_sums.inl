// How the sum of a group's products is added to those of the groups before it. Included by each set of
// kernels inside its own namespace, after panel_store.inl: what computes the integers of one group may
// be chosen by the number of rows, for they are exact, and this is the same.

// Sixteen finite float16 as float32.
inline Floats from_halves(const std::byte* halves) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(halves)));
#else
  const Bits bits = __builtin_convertvector(load<Halves>(halves), Bits);
  // The exponent of a float32 is biased by 112 more; so a float16 below the normal ones is right too.
  const Floats size = reinterpret_cast<Floats>((bits & 0x7fffU) << 13) * 0x1p112f;
  return reinterpret_cast<Floats>(reinterpret_cast<Bits>(size) | (bits & 0x8000U) << 16);
#endif
}

// Of a group of the panel's 32 rows.
template <typename Kind>
struct Scales {
  explicit Scales(const std::byte* group) {
    const std::byte* halves = group + kNumbersBytes<Kind>;
    low = from_halves(halves);
    high = from_halves(halves + 32);
    if constexpr (Kind::kMinima) {
      least_low = from_halves(halves + 64);
      least_high = from_halves(halves + 96);
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

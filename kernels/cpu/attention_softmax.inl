// The softmax of attention.h, tile by tile. Included by each set of kernels inside its own namespace,
// behind vectors.inl and what attention.inl asks for.

// Not wider than a register: sums stay in them.
constexpr int kWidth = POLYCHIP_ISA_WIDTH;
typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
typedef std::int32_t VectorInts __attribute__((vector_size(kWidth * sizeof(float))));

inline void put(Vector values, float* to) { std::memcpy(to, &values, sizeof(values)); }

constexpr float kNever = -__builtin_inff();
constexpr std::int64_t kSumParts = AttentionPlan::kSumParts;

// 2^x for an x of at most 0; exactly 1 at 0 and exactly 0 below the range of normal numbers. 2^n times a
// polynomial of the rest: Cephes' exp2f (S. Moshier), its coefficients; or, where a result is rounded to
// bfloat16 afterwards, one that is off by at most 1 part in 9,800 (least greatest relative error among
// those of third degree that are 1 at 0).
template <bool kRough>
inline Vector power_of_two(Vector x) {
  constexpr float kLowest = -126.0f;
  // Beside so great a number fractions have no room, and its last bits are the whole number.
  constexpr float kGreat = 12582912.0f;
#if defined(__AVX512F__)
  const __mmask16 within = _mm512_cmp_ps_mask(x, _mm512_set1_ps(kLowest), _CMP_NLT_UQ);
  const Vector bounded = x;
#else
  const Vector bounded = x < kLowest ? kLowest - Vector{} : x;
#endif
  const Vector shifted = bounded + kGreat;
  const Vector rest = bounded - (shifted - kGreat);
  Vector sum;
  if constexpr (kRough) {
    sum = 5.500893e-2f - Vector{};
    sum = sum * rest + 2.422110e-1f;
    sum = sum * rest + 6.932829e-1f;
  } else {
    sum = 1.535336188319500e-4f - Vector{};
    sum = sum * rest + 1.339887440266574e-3f;
    sum = sum * rest + 9.618437357674640e-3f;
    sum = sum * rest + 5.550332471162809e-2f;
    sum = sum * rest + 2.402264791363012e-1f;
    sum = sum * rest + 6.931472028550421e-1f;
  }
  sum = sum * rest + 1.0f;
  // Onto the exponent.
  const VectorInts power =
      reinterpret_cast<VectorInts>(sum) + (reinterpret_cast<VectorInts>(shifted) << 23);
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_maskz_mov_epi32(within, reinterpret_cast<__m512i>(power)));
#else
  return x < kLowest ? Vector{} : reinterpret_cast<Vector>(power);
#endif
}

inline Vector greater_of(Vector a, Vector b) { return a > b ? a : b; }

// In any order: a NaN among them may be passed over, its weight will be NaN.
inline float greatest_of(Vector values) {
#if POLYCHIP_ISA_WIDTH == 16
  const auto with = [&](Vector others) { values = greater_of(values, others); };
  with(POLYCHIP_SHUFFLE(values, values, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  with(POLYCHIP_SHUFFLE(values, values, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  with(POLYCHIP_SHUFFLE(values, values, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return values[0] > values[1] ? values[0] : values[1];
#else
  float greatest = values[0];
  for (int lane = 1; lane < kWidth; ++lane) {
    greatest = values[lane] > greatest ? values[lane] : greatest;
  }
  return greatest;
#endif
}

// From `first` to before `stop`, in tokens of a tile.
struct Span {
  std::int64_t first, stop;
};

// Some of a pair's scores of a tile times `factor`, below all numbers where they are not seen.
template <bool kMasked>
Vector scaled(const float* scores, std::int64_t at, float factor, Span seen) {
  const Vector score = load<Vector>(scores + at) * factor;
  if constexpr (kMasked) {
    static constexpr std::int32_t kNumbers[] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                8, 9, 10, 11, 12, 13, 14, 15};
    const VectorInts number = load<VectorInts>(kNumbers) + static_cast<std::int32_t>(at);
    const VectorInts visible = (number >= static_cast<std::int32_t>(seen.first)) &
                               (number < static_cast<std::int32_t>(seen.stop));
    return visible ? score : kNever - Vector{};
  }
  return score;
}

// What is computed of a tile: all of it where all is seen, which the compiler may write out.
template <bool kMasked>
constexpr Span computed(Span span) {
  return kMasked ? span : Span{0, kTileTokens};
}

template <bool kMasked>
float greatest_score(const float* scores, float factor, Span span, Span seen) {
  Vector highest = kNever - Vector{};
  const auto [first, stop] = computed<kMasked>(span);
  for (std::int64_t at = first; at < stop; at += kWidth) {
    highest = greater_of(scaled<kMasked>(scores, at, factor, seen), highest);
  }
  return greatest_of(highest);
}

// Weights relative to `base`; returns their sum, in parts.
template <typename Form, bool kMasked>
Vector weigh_scores(const float* scores, float factor, float base, Span span, Span seen,
                    typename Form::Left* weights) {
  Vector sums[2] = {};
  const auto [first, stop] = computed<kMasked>(span);
  for (std::int64_t at = first; at < stop; at += 2 * kWidth) {
    const Vector one = scaled<kMasked>(scores, at, factor, seen) - base;
    const Vector other = scaled<kMasked>(scores, at + kWidth, factor, seen) - base;
    const Vector powers[2] = {power_of_two<Form::kRough>(one), power_of_two<Form::kRough>(other)};
    sums[0] += powers[0];
    sums[1] += powers[1];
    Form::put_weights(powers[0], powers[1], weights + at);
  }
  return sums[0] + sums[1];
}

// Softmaxes of a group of pairs, over whatever each saw.
struct Softmaxes {
  float* greatest;  // [kPairsAtOnce]: scores, in powers of two
  float* sums;      // [pairs][kSumParts]: of weights relative to the greatest
  float* values;    // [pairs][columns]: weighted alike
};

// What to multiply by what was relative to `own`, now that `greatest` is the greatest.
inline Vector shrunk(Vector own, Vector greatest) {
  return own == greatest ? 1.0f - Vector{} : power_of_two<false>(own - greatest);
}

// Not inlined: at all places the same multiplications are to be one with their additions.
__attribute__((noinline)) void merge_into(const Softmaxes& all, const Softmaxes& part,
                                          std::int64_t pairs, std::int64_t columns) {
  alignas(64) float owns[kPairsAtOnce], others[kPairsAtOnce];
  for (std::int64_t pair = 0; pair < kPairsAtOnce; pair += kWidth) {
    const Vector own = load<Vector>(all.greatest + pair), other = load<Vector>(part.greatest + pair);
    const Vector greatest = greater_of(other, own);
    put(shrunk(own, greatest), owns + pair);
    put(shrunk(other, greatest), others + pair);
    put(greatest, all.greatest + pair);
  }
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    const auto merge = [&](float* to, const float* from, std::int64_t count) {
      for (std::int64_t at = 0; at < count; at += kWidth) {
        put(load<Vector>(to + at) * owns[pair] + load<Vector>(from + at) * others[pair], to + at);
      }
    };
    merge(all.sums + pair * kSumParts, part.sums + pair * kSumParts, kWidth);
    merge(all.values + pair * columns, part.values + pair * columns, columns);
  }
}

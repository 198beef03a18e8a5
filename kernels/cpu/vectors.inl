// Vectors of sixteen numbers as the compiler makes them of the instructions it may use. Included by
// each set of kernels inside its own namespace, so that none is taken for another's.

typedef float Floats __attribute__((vector_size(64)));
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint32_t Bits __attribute__((vector_size(64)));
typedef std::uint16_t Halves __attribute__((vector_size(32)));

constexpr int kLanes = 16;

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define POLYCHIP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef POLYCHIP_SHUFFLE
// GCC before 12.
#define POLYCHIP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

template <typename T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// One number in every lane. Register by register: into a vector of several the compiler would put it
// lane by lane.
template <typename Vector, typename T>
inline Vector spread(T value) {
#if defined(__AVX512F__)
  constexpr std::size_t kRegisterBytes = 64;
#elif defined(__AVX__)
  constexpr std::size_t kRegisterBytes = 32;
#else
  constexpr std::size_t kRegisterBytes = 16;
#endif
  typedef T Register __attribute__((vector_size(kRegisterBytes)));
  const Register part = value - Register{};
  Vector all;
  for (std::size_t at = 0; at < sizeof(all); at += sizeof(part)) {
    std::memcpy(reinterpret_cast<std::byte*>(&all) + at, &part, sizeof(part));
  }
  return all;
}

inline Floats all_of(float value) { return spread<Floats>(value); }

inline Floats widened(Halves values) {
#if defined(__AVX512F__)
  // The compiler would do it in two halves.
  const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(values));
  return reinterpret_cast<Floats>(_mm512_maskz_slli_epi32(0xffff, wide, 16));
#else
  return reinterpret_cast<Floats>(__builtin_convertvector(values, Bits) << 16);
#endif
}

// To the nearest, ties to even; a NaN stays one.
inline Halves narrowed(Floats values) {
  const Bits bits = reinterpret_cast<Bits>(values);
  const Bits rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const Ints nan = values != values;
  const Bits unordered = reinterpret_cast<Bits>(nan);
  return __builtin_convertvector((unordered & 0x7fc0U) | (~unordered & rounded), Halves);
}

inline Floats read(const float* from) { return load<Floats>(from); }
inline Floats read(const std::uint16_t* from) { return widened(load<Halves>(from)); }
inline void write(float* to, Floats values) { std::memcpy(to, &values, sizeof(values)); }
inline void write(std::uint16_t* to, Floats values) {
  const Halves halves = narrowed(values);
  std::memcpy(to, &halves, sizeof(halves));
}

// The first `count` of sixteen, zeros behind them.
template <typename T>
inline Floats read_some(const T* from, std::int64_t count) {
  T numbers[kLanes] = {};
  std::memcpy(numbers, from, static_cast<std::size_t>(count) * sizeof(T));
  return read(numbers);
}

template <typename T>
inline void write_some(T* to, Floats values, std::int64_t count) {
  T numbers[kLanes];
  write(numbers, values);
  std::memcpy(to, numbers, static_cast<std::size_t>(count) * sizeof(T));
}

inline float sum_of(Floats values) {
  values += POLYCHIP_SHUFFLE(values, values, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  values += POLYCHIP_SHUFFLE(values, values, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  values += POLYCHIP_SHUFFLE(values, values, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return values[0] + values[1];
}

inline Floats select(Ints chosen, Floats yes, Floats no) {
  const Bits mask = reinterpret_cast<Bits>(chosen);
  return reinterpret_cast<Floats>((mask & reinterpret_cast<Bits>(yes)) |
                                  (~mask & reinterpret_cast<Bits>(no)));
}

// e^x to some 2 units in the last place, 0 below the range of normal numbers, infinity above it.
// 2^n times a polynomial of the rest: Cephes' expf (S. Moshier), its coefficients.
inline Floats exponential(Floats x) {
  constexpr float kLowest = -87.3365f, kHighest = 88.7228f;
  const Floats bounded = select(x < kLowest, all_of(kLowest), select(x > kHighest, all_of(kHighest), x));
  const Floats scaled = bounded * 1.44269504f;
  const Floats shifted = scaled + select(scaled < 0.0f, all_of(-0.5f), all_of(0.5f));
  const Ints whole = __builtin_convertvector(shifted, Ints);
  const Floats count = __builtin_convertvector(whole, Floats);
  const Floats rest = bounded - count * 0.693359375f + count * 2.12194440e-4f;
  Floats sum = all_of(1.9875691500e-4f);
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  // In two factors: 2^128 alone is out of range.
  const Ints first = whole >> 1, second = whole - first;
  const Floats scaled_once = sum * reinterpret_cast<Floats>((first + 127) << 23);
  const Floats power = scaled_once * reinterpret_cast<Floats>((second + 127) << 23);
  const Floats found = select(x < kLowest, Floats{}, power);
  const Floats above = select(x > kHighest, all_of(__builtin_inff()), found);
  return select(x != x, x, above);
}

// Near 0 a polynomial, for the exponential's rounding would be all that is left: Cephes' tanhf (S.
// Moshier), its coefficients and its border.
inline Floats hyperbolic_tangent(Floats x) {
  const Floats square = x * x;
  Floats sum = all_of(-5.70498872745e-3f);
  sum = sum * square + 2.06390887954e-2f;
  sum = sum * square - 5.37397155531e-2f;
  sum = sum * square + 1.33314422036e-1f;
  sum = sum * square - 3.33332819422e-1f;
  const Floats near = sum * square * x + x;
  const Floats far = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
  return select((x < 0.625f) & (x > -0.625f), near, far);
}

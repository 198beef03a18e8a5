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

#if defined(__AVX512F__)
constexpr std::size_t kRegisterBytes = 64;
#elif defined(__AVX__)
constexpr std::size_t kRegisterBytes = 32;
#else
constexpr std::size_t kRegisterBytes = 16;
#endif
// The vectors of one register. Of wider ones the compiler makes and compares number by number.
typedef float RegisterFloats __attribute__((vector_size(kRegisterBytes)));
typedef std::int32_t RegisterInts __attribute__((vector_size(kRegisterBytes)));
typedef std::uint32_t RegisterBits __attribute__((vector_size(kRegisterBytes)));

// One number in every lane.
template <typename Vector, typename T>
inline Vector spread(T value) {
  typedef T Register __attribute__((vector_size(kRegisterBytes)));
  const Register part = value - Register{};
  Vector all;
  for (std::size_t at = 0; at < sizeof(all); at += sizeof(part)) {
    std::memcpy(reinterpret_cast<std::byte*>(&all) + at, &part, sizeof(part));
  }
  return all;
}

// What `function` makes of each register's part of `values`.
template <typename Function>
inline Floats by_register(Floats values, Function function) {
  for (std::size_t at = 0; at < sizeof(values); at += kRegisterBytes) {
    std::byte* place = reinterpret_cast<std::byte*>(&values) + at;
    const RegisterFloats part = function(load<RegisterFloats>(place));
    std::memcpy(place, &part, sizeof(part));
  }
  return values;
}

inline Floats all_of(float value) { return spread<Floats>(value); }

// As many numbers of 16 bits as a register has lanes, each in a word of its own.
inline RegisterBits in_words(const void* from) {
  // The compiler would do it in two halves.
#if defined(__AVX512F__)
  return reinterpret_cast<RegisterBits>(_mm512_maskz_cvtepu16_epi32(0xffff, load<__m256i>(from)));
#elif defined(__AVX2__)
  return reinterpret_cast<RegisterBits>(_mm256_cvtepu16_epi32(load<__m128i>(from)));
#else
  typedef std::uint16_t Part __attribute__((vector_size(kRegisterBytes / 2)));
  return __builtin_convertvector(load<Part>(from), RegisterBits);
#endif
}

// As many bfloat16 numbers as a register has lanes.
inline RegisterFloats widened_part(const void* from) {
  return reinterpret_cast<RegisterFloats>(in_words(from) << 16);
}

inline float widened(std::uint16_t number) {
  const std::uint32_t bits = std::uint32_t{number} << 16;
  return load<float>(&bits);
}

inline Floats widened(Halves values) {
  Floats all;
  for (std::size_t at = 0; at < sizeof(values); at += kRegisterBytes / 2) {
    const RegisterFloats wide = widened_part(reinterpret_cast<const std::byte*>(&values) + at);
    std::memcpy(reinterpret_cast<std::byte*>(&all) + 2 * at, &wide, sizeof(wide));
  }
  return all;
}

// To the nearest, ties to even; a NaN stays one.
inline Halves narrowed(Floats values) {
  const Floats upper = by_register(values, [](RegisterFloats part) {
    const RegisterBits bits = reinterpret_cast<RegisterBits>(part);
    const RegisterBits rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const RegisterBits ordered = reinterpret_cast<RegisterBits>(part == part);
    return reinterpret_cast<RegisterFloats>((ordered & rounded) | (~ordered & 0x7fc0U));
  });
#if defined(__AVX2__) && !defined(__AVX512F__)
  // The compiler would do it number by number.
  const auto* from = reinterpret_cast<const __m256i*>(&upper);
  const __m256i packed = _mm256_packus_epi32(from[0], from[1]);
  return reinterpret_cast<Halves>(_mm256_permute4x64_epi64(packed, 0xd8));
#else
  return __builtin_convertvector(reinterpret_cast<Bits>(upper), Halves);
#endif
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

// e^x to some 2 units in the last place, 0 below the range of normal numbers, infinity above it.
// 2^n times a polynomial of the rest: Cephes' expf (S. Moshier), its coefficients.
inline RegisterFloats exponential(RegisterFloats x) {
  constexpr float kLowest = -87.3365f, kHighest = 88.7228f;
  const RegisterFloats above_lowest = x < kLowest ? kLowest - RegisterFloats{} : x;
  const RegisterFloats bounded = x > kHighest ? kHighest - RegisterFloats{} : above_lowest;
  const RegisterFloats scaled = bounded * 1.44269504f;
  const RegisterFloats half = 0.5f - RegisterFloats{};
  const RegisterFloats shifted = scaled + (scaled < 0.0f ? -half : half);
  const RegisterInts whole = __builtin_convertvector(shifted, RegisterInts);
  const RegisterFloats count = __builtin_convertvector(whole, RegisterFloats);
  const RegisterFloats rest = bounded - count * 0.693359375f + count * 2.12194440e-4f;
  RegisterFloats sum = 1.9875691500e-4f - RegisterFloats{};
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  // In two factors: 2^128 alone is out of range.
  const RegisterInts first = whole >> 1, second = whole - first;
  const RegisterFloats scaled_once = sum * reinterpret_cast<RegisterFloats>((first + 127) << 23);
  const RegisterFloats power = scaled_once * reinterpret_cast<RegisterFloats>((second + 127) << 23);
  const RegisterFloats found = x < kLowest ? RegisterFloats{} : power;
  const RegisterFloats above = x > kHighest ? __builtin_inff() - RegisterFloats{} : found;
  return x != x ? x : above;
}

// Near 0 a polynomial, for the exponential's rounding would be all that is left: Cephes' tanhf (S.
// Moshier), its coefficients and its border.
inline RegisterFloats hyperbolic_tangent(RegisterFloats x) {
  const RegisterFloats square = x * x;
  RegisterFloats sum = -5.70498872745e-3f - RegisterFloats{};
  sum = sum * square + 2.06390887954e-2f;
  sum = sum * square - 5.37397155531e-2f;
  sum = sum * square + 1.33314422036e-1f;
  sum = sum * square - 3.33332819422e-1f;
  const RegisterFloats near = sum * square * x + x;
  const RegisterFloats far = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
  return (x < 0.625f) & (x > -0.625f) ? near : far;
}

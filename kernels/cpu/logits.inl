// The kernels of logits.h for one set of instructions: compiled once for each, in the namespace
// POLYCHIP_ISA.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "logits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace polychip {
namespace POLYCHIP_ISA {
namespace {

// As wide as the machine's: of wider ones the compiler compares number by number.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t Bits __attribute__((vector_size(kVectorBytes)));
typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));
typedef double Doubles __attribute__((vector_size(kVectorBytes)));
typedef std::int64_t LongInts __attribute__((vector_size(kVectorBytes)));
typedef std::uint64_t LongBits __attribute__((vector_size(kVectorBytes)));

constexpr int kLanes = kVectorBytes / 4;
constexpr std::uint32_t kAllLanes = (1U << kLanes) - 1;
constexpr float kNever = -__builtin_inff();

inline Floats all_of(float value) { return value - Floats{}; }
inline Doubles all_of(double value) { return value - Doubles{}; }

inline Floats read(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof(values));
  return values;
}

// ---------------------------------------------------------------- passes over a row

// A bit for each lane that is chosen.
inline std::uint32_t lanes_of(Ints chosen) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(chosen));
#elif defined(__AVX2__)
  return static_cast<std::uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(chosen)));
#elif defined(__x86_64__)
  return static_cast<std::uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(chosen)));
#else
  std::uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= static_cast<std::uint32_t>(chosen[i] & 1 << i);
  return lanes;
#endif
}

// Calls `body(place, vector, lanes)` for each vector of the numbers from `first` to before `stop`,
// until it returns true. `lanes` are those that have a number; the others of the last hold -infinity.
template <typename Body>
inline void each_vector(const float* numbers, std::int64_t first, std::int64_t stop, Body body) {
  std::int64_t place = first;
  for (; place + kLanes <= stop; place += kLanes) {
    if (body(place, read(numbers + place), kAllLanes)) return;
  }
  if (place == stop) return;
  float rest[kLanes];
  std::fill_n(rest, kLanes, kNever);
  std::copy(numbers + place, numbers + stop, rest);
  body(place, read(rest), kAllLanes >> (kLanes - (stop - place)));
}

// Calls `body(lane)` for each lane, the lowest first.
template <typename Body>
inline void each_lane(std::uint32_t lanes, Body body) {
  for (; lanes != 0; lanes &= lanes - 1) body(__builtin_ctz(lanes));
}

Likeliest likeliest(const float* logits, std::int64_t count) {
  Floats greatest = all_of(kNever);
  Ints unordered = {};
  each_vector(logits, 0, count, [&](std::int64_t, Floats x, std::uint32_t) {
    greatest = x > greatest ? x : greatest;
    unordered |= x != x;
    return false;
  });
  float largest = greatest[0];
  for (int i = 1; i < kLanes; ++i) largest = std::max(largest, greatest[i]);
  Likeliest found{largest, 0, lanes_of(unordered) == 0};
  each_vector(logits, 0, count, [&](std::int64_t place, Floats x, std::uint32_t) {
    const std::uint32_t lanes = lanes_of(x == largest);
    if (lanes != 0) found.id = place + __builtin_ctz(lanes);
    return lanes != 0;
  });
  return found;
}

void values_from(const float* logits, std::int64_t count, float least, std::vector<float>& found) {
  each_vector(logits, 0, count, [&](std::int64_t place, Floats x, std::uint32_t lanes) {
    each_lane(lanes_of(x >= least) & lanes,
              [&](int lane) { found.push_back(logits[place + lane]); });
    return false;
  });
}

void ids_from(const float* logits, std::int64_t count, float least,
              std::vector<std::int64_t>& found) {
  each_vector(logits, 0, count, [&](std::int64_t place, Floats x, std::uint32_t lanes) {
    each_lane(lanes_of(x >= least) & lanes, [&](int lane) { found.push_back(place + lane); });
    return false;
  });
}

// ---------------------------------------------------------------- weights

// e^x for x <= 0, to about a unit in the last place and exactly 1 at 0; 0 where it is no normal number.
// 2^n times Taylor's series of the rest, which is at most ln(2) / 2.
inline Doubles exponential(Doubles x) {
  constexpr double kLowest = -708.0;
  constexpr double kInverseFactorials[] = {
      1.0,          1.0,           1.0 / 2,        1.0 / 6,         1.0 / 24,
      1.0 / 120,    1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
      1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  // Added to a small number it leaves the nearest whole one in the lowest bits.
  constexpr double kWhole = 6755399441055744.0;
  const LongInts below = x < kLowest;
  const Doubles bounded = below ? all_of(kLowest) : x;
  const Doubles shifted = bounded * 1.4426950408889634 + kWhole;
  const Doubles count = shifted - kWhole;
  // ln(2) in two parts, of which the first times any count is exact.
  const Doubles rest = bounded - count * 0.693147180369123816490 - count * 1.90821492927058770002e-10;
  Doubles sum = all_of(kInverseFactorials[13]);
  for (int n = 12; n >= 0; --n) sum = sum * rest + kInverseFactorials[n];
  const LongBits power = reinterpret_cast<LongBits>(sum) + (reinterpret_cast<LongBits>(shifted) << 52);
  return below ? Doubles{} : reinterpret_cast<Doubles>(power);
}

template <typename Scale>
double sum_of_powers(const float* logits, std::int64_t count, Scale scale) {
  Doubles low = {}, high = {};
  each_vector(logits, 0, count, [&](std::int64_t, Floats x, std::uint32_t) {
    HalfFloats halves[2];
    std::memcpy(halves, &x, sizeof(x));
    low += exponential(scale(__builtin_convertvector(halves[0], Doubles)));
    high += exponential(scale(__builtin_convertvector(halves[1], Doubles)));
    return false;
  });
  const Doubles sums = low + high;
  double sum = 0.0;
  for (int i = 0; i < kLanes / 2; ++i) sum += sums[i];
  return sum;
}

double sum_of_weights(const float* logits, std::int64_t count, float largest, double temperature) {
  const double scaled_largest = largest / temperature;
  if (temperature == 1.0) {
    // The division would take half of the time.
    return sum_of_powers(logits, count, [&](Doubles x) { return x - scaled_largest; });
  }
  return sum_of_powers(logits, count, [&](Doubles x) { return x / temperature - scaled_largest; });
}

// ---------------------------------------------------------------- draws

constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15;

// The output function of splitmix64, see kernels/sampling_reference.py: of a number, or of a vector.
template <typename State>
inline State mixed(State state) {
  state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9U;
  state = (state ^ state >> 27) * 0x94D049BB133111EBU;
  return state ^ state >> 31;
}

std::uint64_t state_of(const Race& race) {
  std::uint64_t state = 0;
  for (const std::int64_t part : {race.seed, race.choice, race.index}) {
    state = mixed(state + static_cast<std::uint64_t>(part) + kGamma);
  }
  return state;
}

// A token's noise is -log(arrival) with arrival = -log(u), u between 0 and 1.
double noise_of(std::uint64_t state, std::int64_t id) {
  const std::uint64_t bits = mixed(state + static_cast<std::uint64_t>(id + 1) * kGamma);
  const double u = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
  return -std::log(-std::log(u));
}

// 2^31 (1 - u) of a vector of tokens from `first` on, rounded down: not above 2^31 times their arrivals.
inline Floats earliest_arrivals(std::uint64_t state, std::int64_t first) {
  LongBits even;
  for (int i = 0; i < kLanes / 2; ++i) even[i] = static_cast<std::uint64_t>(2 * i + 1) * kGamma;
  even += state + static_cast<std::uint64_t>(first) * kGamma;
  // Upper halves of tokens side by side: each other one's lies where it has to be.
  const LongBits upper = (mixed(even) >> 32) | (mixed(even + kGamma) & 0xFFFFFFFF00000000U);
  return __builtin_convertvector(reinterpret_cast<Ints>(~reinterpret_cast<Bits>(upper) >> 1), Floats);
}

// 2^x for x <= 0, to one part in 10,000; 0 below the range of normal numbers.
inline Floats rough_power(Floats x) {
  constexpr float kLowest = -126.0f;
  // Added to a small number it leaves the nearest whole one in the lowest bits.
  constexpr float kWhole = 12582912.0f;
  const Floats bounded = x < kLowest ? all_of(kLowest) : x;
  const Floats shifted = bounded + kWhole;
  const Floats rest = bounded - (shifted - kWhole);
  // Taylor's series, for at most 1/2.
  Floats sum = all_of(0.0096181f);
  sum = sum * rest + 0.0555041f;
  sum = sum * rest + 0.2402265f;
  sum = sum * rest + 0.6931472f;
  sum = sum * rest + 1.0f;
  const Bits power = reinterpret_cast<Bits>(sum) + (reinterpret_cast<Bits>(shifted) << 23);
  return x < kLowest ? Floats{} : reinterpret_cast<Floats>(power);
}

// The largest logit / temperature + noise is the smallest arrival / weight, with weight = exp(logit /
// temperature - that of the likeliest). An arrival is not below 1 - u, which takes no logarithm: only
// tokens with 1 - u <= weight * (the smallest so far) can win, a few of a row, and of these the exact
// scores are compared. Where scores are so large that their rounding counts, different logits are far
// apart, and equal ones are met in the order of their ids, as a tie asks for.
class Runners {
 public:
  explicit Runners(const Race& race)
      : race_(race),
        state_(state_of(race)),
        scaled_largest_(race.likeliest.logit / race.temperature),
        best_(drawn(race.likeliest.id)) {
    find_limit();
  }

  const Drawn& best() const { return best_; }

  void run(std::int64_t first, std::int64_t stop) {
    // In range of float32, for the sake of the product with what is 0.
    constexpr float kMax = std::numeric_limits<float>::max();
    constexpr double kLog2E = 1.4426950408889634;
    const auto rate = static_cast<float>(std::min(kLog2E / race_.temperature, double{kMax}));
    each_vector(race_.logits, first, stop, [&](std::int64_t place, Floats x, std::uint32_t lanes) {
      const Ints alive = x >= race_.survivors.least;
      if (lanes_of(alive) == 0) return false;
      const Floats below = x - race_.likeliest.logit;
      const Floats weight = rough_power((below < -kMax ? all_of(-kMax) : below) * rate);
      const Ints early = earliest_arrivals(state_, place) <= weight * limit_;
      each_lane(lanes_of(alive & early) & lanes, [&](int lane) { consider(place + lane); });
      return false;
    });
  }

 private:
  Drawn drawn(std::int64_t id) const {
    return {race_.logits[id] / race_.temperature + noise_of(state_, id), id};
  }

  void find_limit() {
    // More than what rough weights are wrong by.
    constexpr double kSlack = 1e-3;
    limit_ = static_cast<float>(0x1p31 * std::exp(scaled_largest_ - best_.score + kSlack));
  }

  void consider(std::int64_t id) {
    const Survivors& survivors = race_.survivors;
    const float logit = race_.logits[id];
    if (logit == survivors.border && id > survivors.last_tied) return;
    if (survivors.min_weight > 0.0 &&
        std::exp(logit / race_.temperature - scaled_largest_) < survivors.min_weight) {
      return;
    }
    const Drawn next = drawn(id);
    if (!next.before(best_)) return;
    best_ = next;
    find_limit();
  }

  const Race& race_;
  std::uint64_t state_;
  double scaled_largest_;
  Drawn best_;
  float limit_ = 0.0f;
};

Drawn race(const Race& call, std::int64_t first, std::int64_t stop) {
  Runners runners(call);
  runners.run(first, stop);
  return runners.best();
}

}  // namespace

const LogitKernels kLogitKernels = {likeliest, sum_of_weights, values_from, ids_from, race};

}  // namespace POLYCHIP_ISA
}  // namespace polychip

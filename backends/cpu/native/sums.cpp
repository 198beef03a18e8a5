#include "sums.h"

#include <algorithm>
#include <cstring>

// Compiled for each width of vectors; the widest that the machine has is taken when the library is
// loaded. Elements are added one by one in any of them, so the bits are the same.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define POLYCHIP_FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define POLYCHIP_FOR_EACH_WIDTH
#endif

namespace polychip {
namespace {

// Elements summed at a time; the running sums stay in the first-level cache.
constexpr std::uint64_t kTile = 512;

// A type added as it is: float and double, and unsigned integers, which wrap around.
template <typename T>
struct Plain {
  using Stored = T;
  using Wide = T;
  static Wide widen(Stored value) { return value; }
  static Stored narrow(Wide value) { return value; }
  static Wide add(Wide left, Wide right) { return static_cast<Wide>(left + right); }
};

struct Half {
  using Stored = _Float16;
  using Wide = float;
  static Wide widen(Stored value) { return static_cast<Wide>(value); }
  static Stored narrow(Wide value) { return static_cast<Stored>(value); }
  static Wide add(Wide left, Wide right) { return left + right; }
};

struct Brain {
  using Stored = std::uint16_t;  // the upper half of a float
  using Wide = float;

  static Wide widen(Stored value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    Wide wide;
    std::memcpy(&wide, &bits, sizeof(wide));
    return wide;
  }

  // To the nearest, ties to even.
  static Stored narrow(Wide value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const std::uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    // Rounding could carry a NaN over into an infinity.
    return static_cast<Stored>(value != value ? 0x7FC0 : rounded);
  }

  static Wide add(Wide left, Wide right) { return left + right; }
};

struct Boolean : Plain<std::uint8_t> {
  static Wide add(Wide left, Wide right) { return left | right; }
};

template <typename Codec>
POLYCHIP_FOR_EACH_WIDTH void sum_as(const char* const* inputs, int inputs_count, char* output,
                                    std::uint64_t bytes) {
  using Stored = typename Codec::Stored;
  const std::uint64_t count = bytes / sizeof(Stored);
  typename Codec::Wide totals[kTile];
  for (std::uint64_t start = 0; start < count; start += kTile) {
    const std::uint64_t size = std::min(kTile, count - start);
    const Stored* const first = reinterpret_cast<const Stored*>(inputs[0]) + start;
    for (std::uint64_t i = 0; i < size; ++i) totals[i] = Codec::widen(first[i]);
    for (int input = 1; input < inputs_count; ++input) {
      const Stored* const next = reinterpret_cast<const Stored*>(inputs[input]) + start;
      for (std::uint64_t i = 0; i < size; ++i) {
        totals[i] = Codec::add(totals[i], Codec::widen(next[i]));
      }
    }
    // Only now, when every input of the tile was read, may one of them be overwritten.
    Stored* const target = reinterpret_cast<Stored*>(output) + start;
    for (std::uint64_t i = 0; i < size; ++i) target[i] = Codec::narrow(totals[i]);
  }
}

}  // namespace

void sum(SumType type, const char* const* inputs, int inputs_count, char* output,
         std::uint64_t bytes) {
  switch (type) {
    case SumType::kNone: return;
    case SumType::kFloat32: return sum_as<Plain<float>>(inputs, inputs_count, output, bytes);
    case SumType::kFloat64: return sum_as<Plain<double>>(inputs, inputs_count, output, bytes);
    case SumType::kFloat16: return sum_as<Half>(inputs, inputs_count, output, bytes);
    case SumType::kBFloat16: return sum_as<Brain>(inputs, inputs_count, output, bytes);
    case SumType::kInteger8: return sum_as<Plain<std::uint8_t>>(inputs, inputs_count, output, bytes);
    case SumType::kInteger16: return sum_as<Plain<std::uint16_t>>(inputs, inputs_count, output, bytes);
    case SumType::kInteger32: return sum_as<Plain<std::uint32_t>>(inputs, inputs_count, output, bytes);
    case SumType::kInteger64: return sum_as<Plain<std::uint64_t>>(inputs, inputs_count, output, bytes);
    case SumType::kBoolean: return sum_as<Boolean>(inputs, inputs_count, output, bytes);
  }
}

}  // namespace polychip

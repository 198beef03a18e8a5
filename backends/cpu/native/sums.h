// Sums over the ranks: always in the order 0, 1, .. n - 1, so that every rank gets the same bits.
#pragma once

#include <cstdint>

namespace polychip {

// How bytes are added. Also part of the C interface.
enum class SumType : std::uint32_t {
  kNone = 0,  // cannot be added
  kFloat32 = 1,
  kFloat64 = 2,
  kFloat16 = 3,
  kBFloat16 = 4,
  kInteger8 = 5,  // signed or not: integers wrap around, which is the same addition
  kInteger16 = 6,
  kInteger32 = 7,
  kInteger64 = 8,
  kBoolean = 9,  // or
};

// output = inputs[0] + inputs[1] + .. of `bytes` bytes each. Half precision is added in float32 and
// rounded once. The output may be one of the inputs.
void sum(SumType type, const char* const* inputs, int inputs_count, char* output,
         std::uint64_t bytes);

}  // namespace polychip

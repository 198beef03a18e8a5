#include "quantized.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace polychip {
namespace {

constexpr float kHalfMax = 65504.0f;

float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float from_half(std::uint16_t half) {
  // Exponents of float32 are 112 larger; the product also makes those normal that are not in float16.
  const std::uint32_t bits = (half & 0x7fffU) << 13;
  const float value = bits < 0x0f800000U ? from_bits(bits) * 0x1p112f : from_bits(bits | 0x7f800000U);
  return (half & 0x8000) != 0 ? -value : value;
}

// The least float16 that is no less than `value`, which is not negative; the greatest there is for
// what is beyond.
std::uint16_t half_from(float value) {
  if (!(value < kHalfMax)) return 0x7bff;
  int exponent;
  std::frexp(value, &exponent);
  // Below 2^-14 float16 has one step size.
  const int scale = std::max(exponent, -13) - 11;
  const float steps = std::ceil(std::ldexp(value, -scale));
  // 2^11 steps are the first number of the next exponent, and their bits say so.
  return static_cast<std::uint16_t>(((scale + 24) << 10) + static_cast<int>(steps));
}

template <typename T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// Four columns of a row, and where they are in each group.
constexpr std::int64_t kStepColumns = 4;

std::byte* step_of(std::byte* group, std::int64_t step, std::int64_t row) {
  return group + (step * kPanelRows + row) * kStepColumns;
}

template <typename Kind>
std::byte* scale_of(std::byte* group, std::int64_t row) {
  return group + kNumbersBytes<Kind> + row * static_cast<std::int64_t>(sizeof(std::uint16_t));
}

template <typename Kind>
std::byte* minimum_of(std::byte* group, std::int64_t row) {
  return scale_of<Kind>(group, row + kPanelRows);
}

}  // namespace

std::size_t group_bytes(Form form) {
  return with_quantized(form, [](auto kind) { return kGroupBytes<decltype(kind)>; });
}

std::size_t block_bytes(Form form) {
  return with_quantized(form, [](auto kind) {
    using Kind = decltype(kind);
    return sizeof(std::uint16_t) * (Kind::kMinima ? 2 : 1) + kGroupColumns * Kind::kBits / 8;
  });
}

void write_group(std::byte* group, std::int64_t row, const float* numbers) {
  float largest = 0.0f;
  for (std::int64_t i = 0; i < kGroupColumns; ++i) {
    largest = std::max(largest, std::fabs(numbers[i]));
  }
  // Rounded up, so that the largest number is not cut.
  const std::uint16_t half = half_from(largest / 127.0f);
  const float scale = from_half(half);
  for (std::int64_t i = 0; i < kGroupColumns; ++i) {
    const float steps = scale > 0.0f ? std::nearbyint(numbers[i] / scale) : 0.0f;
    const int bounded = static_cast<int>(std::min(127.0f, std::max(-127.0f, steps)));
    step_of(group, i / kStepColumns, row)[i % kStepColumns] =
        static_cast<std::byte>(bounded + Q8::kOffset);
  }
  std::memcpy(scale_of<Q8>(group, row), &half, sizeof(half));
}

void write_block(Form form, std::byte* group, std::int64_t row, const std::byte* block) {
  with_quantized(form, [&](auto kind) {
    using Kind = decltype(kind);
    constexpr std::size_t kHalf = sizeof(std::uint16_t);
    std::memcpy(scale_of<Kind>(group, row), block, kHalf);
    const std::byte* numbers = block + kHalf;
    if constexpr (Kind::kMinima) {
      std::memcpy(minimum_of<Kind>(group, row), numbers, kHalf);
      numbers += kHalf;
    }
    constexpr std::int64_t kSteps = kGroupColumns * Kind::kBits / 8 / kStepColumns;
    for (std::int64_t step = 0; step < kSteps; ++step, numbers += kStepColumns) {
      std::byte* place = step_of(group, step, row);
      // GGUF's bytes of 4 bits hold the same two columns as ours. Those of 8 bits have a sign.
      std::memcpy(place, numbers, kStepColumns);
      if constexpr (Kind::kBits == 8) {
        for (std::int64_t i = 0; i < kStepColumns; ++i) place[i] ^= std::byte{Kind::kOffset};
      }
    }
  });
}

void read_block(Form form, const std::byte* block, float* numbers) {
  with_quantized(form, [&](auto kind) {
    using Kind = decltype(kind);
    const float scale = from_half(load<std::uint16_t>(block));
    block += sizeof(std::uint16_t);
    float minimum = 0.0f;
    if constexpr (Kind::kMinima) {
      minimum = from_half(load<std::uint16_t>(block));
      block += sizeof(std::uint16_t);
    }
    if constexpr (Kind::kBits == 8) {
      for (std::int64_t i = 0; i < kGroupColumns; ++i) {
        numbers[i] = static_cast<float>(static_cast<std::int8_t>(block[i])) * scale;
      }
    } else {
      constexpr std::int64_t kHalf = kGroupColumns / 2;
      for (std::int64_t i = 0; i < kHalf; ++i) {
        const int both = static_cast<int>(block[i]);
        numbers[i] = static_cast<float>((both & 15) - Kind::kOffset) * scale + minimum;
        numbers[i + kHalf] = static_cast<float>((both >> 4) - Kind::kOffset) * scale + minimum;
      }
    }
  });
}

void read_group(Form form, const std::byte* from, std::int64_t row, float* numbers) {
  auto* group = const_cast<std::byte*>(from);
  with_quantized(form, [&](auto kind) {
    using Kind = decltype(kind);
    const float scale = from_half(load<std::uint16_t>(scale_of<Kind>(group, row)));
    float minimum = 0.0f;
    if constexpr (Kind::kMinima) {
      minimum = from_half(load<std::uint16_t>(minimum_of<Kind>(group, row)));
    }
    for (std::int64_t i = 0; i < kGroupColumns; ++i) {
      int number;
      if constexpr (Kind::kBits == 8) {
        number = static_cast<int>(step_of(group, i / kStepColumns, row)[i % kStepColumns]);
      } else {
        const std::int64_t place = i % (kGroupColumns / 2);
        const std::byte both = step_of(group, place / kStepColumns, row)[place % kStepColumns];
        number = static_cast<int>(i == place ? both & std::byte{15} : both >> 4);
      }
      numbers[i] = static_cast<float>(number - Kind::kOffset) * scale + minimum;
    }
  });
}

void ActivationMemory::reserve(std::int64_t rows, std::int64_t groups) {
  const std::int64_t whole = (rows + kActivationRows - 1) / kActivationRows * kActivationRows;
  const auto wanted = static_cast<std::size_t>(whole * groups);
  if (wanted <= scales_.size()) return;
  numbers_.resize(wanted * kGroupColumns);
  scales_.resize(wanted);
  sums_.resize(wanted);
}

QuantizedKernels quantized_kernels(Instructions instructions) {
  switch (instructions) {
#if defined(__x86_64__)
    case Instructions::kAmx:
      return {avx512::kQuantizedKernels.quantize, amx::quantized_panel};
    case Instructions::kAvx512:
      return avx512::kQuantizedKernels;
    case Instructions::kAvx2:
      return avx2::kQuantizedKernels;
#endif
    default:
      return portable::kQuantizedKernels;
  }
}

}  // namespace polychip

// The kernels of linear.h in vectors of the compiler's, for one set of instructions: compiled once
// for each, in the namespace POLYCHIP_ISA.

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "linear.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace polychip {
namespace POLYCHIP_ISA {
namespace {

#include "panel_store.inl"

// Numbers in a register. The compiler keeps sums of wider vectors in memory.
constexpr int kWidth = kRegisterBytes / sizeof(float);
// Sums that fill the registers, beside what is multiplied.
constexpr int kSumsMax = POLYCHIP_ISA_SUMS;
// How far ahead of its use a weight is asked for.
constexpr std::ptrdiff_t kAheadBytes = kWidth == 16 ? 2048 : 4096;

inline RegisterFloats in_all(float value) { return value - RegisterFloats{}; }

// Of some rows of the activations with some of the panel's, which are as many registers.
template <int kRows, int kParts>
using PartSums = RegisterFloats[kRows][kParts];

struct Float32 {
  using T = float;
  static constexpr std::int64_t kStep = 1;

  template <int kRows, int kParts>
  static void add(PartSums<kRows, kParts>& sums, const T* weights, const T* input,
                  std::int64_t stride) {
    RegisterFloats parts[kParts];
    for (int part = 0; part < kParts; ++part) {
      parts[part] = load<RegisterFloats>(weights + part * kWidth);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const RegisterFloats x = in_all(input[row * stride]);
#pragma GCC unroll 16
      for (int part = 0; part < kParts; ++part) sums[row][part] += parts[part] * x;
    }
  }
};

struct Bfloat16 {
  using T = std::uint16_t;
  static constexpr std::int64_t kStep = 2;

  template <int kRows, int kParts>
  static void add(PartSums<kRows, kParts>& sums, const T* weights, const T* input,
                  std::int64_t stride) {
#if defined(__AVX512BF16__)
    __m512bh parts[kParts];
    for (int part = 0; part < kParts; ++part) {
      parts[part] = load<__m512bh>(weights + 2 * part * kWidth);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const auto x = (__m512bh)_mm512_set1_epi32(load<std::int32_t>(input + row * stride));
#pragma GCC unroll 16
      for (int part = 0; part < kParts; ++part) {
        sums[row][part] = _mm512_dpbf16_ps(sums[row][part], parts[part], x);
      }
    }
#else
    // A pair of numbers is the two halves of 32 bits; the upper half is a float32 as it stands. First one
    // half of all, then the other, for want of registers.
    const auto add_half = [&](auto half) {
      RegisterFloats parts[kParts];
      for (int part = 0; part < kParts; ++part) {
        parts[part] = half(load<RegisterBits>(weights + 2 * part * kWidth));
      }
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        const RegisterBits pair = load<std::uint32_t>(input + row * stride) - RegisterBits{};
        const RegisterFloats x = half(pair);
#pragma GCC unroll 16
        for (int part = 0; part < kParts; ++part) sums[row][part] += parts[part] * x;
      }
    };
    add_half([](RegisterBits pairs) { return reinterpret_cast<RegisterFloats>(pairs << 16); });
    add_half([](RegisterBits pairs) { return reinterpret_cast<RegisterFloats>(pairs & 0xffff0000U); });
#endif
  }
};

// The products of some rows of the activations with those rows of the panel that begin at `begin`.
template <typename Kind, int kRows, int kParts>
void compute_part(const Product& product, std::int32_t panel, std::int64_t first, std::int64_t begin,
                  float (*found)[kPanelRows]) {
  using T = typename Kind::T;
  const T* weights = reinterpret_cast<const T*>(product.weight->panel(panel)) + begin * Kind::kStep;
  const T* input = static_cast<const T*>(product.input) + first * product.input_stride;
  const std::int64_t columns = product.weight->columns();
  PartSums<kRows, kParts> sums = {};
  std::int64_t column = 0;
  for (; column + Kind::kStep <= columns; column += Kind::kStep) {
    for (std::size_t line = 0; line < kParts * kRegisterBytes; line += 64) {
      __builtin_prefetch(reinterpret_cast<const std::byte*>(weights) + kAheadBytes + line);
    }
    Kind::template add<kRows, kParts>(sums, weights, input + column, product.input_stride);
    weights += kPanelRows * Kind::kStep;
  }
  if (column < columns) {
    // The odd last one with a zero beside it: what follows in memory may be another row, or nothing.
    T last[kRows * Kind::kStep] = {};
    for (int row = 0; row < kRows; ++row) {
      last[row * Kind::kStep] = input[row * product.input_stride + column];
    }
    Kind::template add<kRows, kParts>(sums, weights, last, Kind::kStep);
  }
  for (int row = 0; row < kRows; ++row) std::memcpy(found[row] + begin, sums[row], sizeof(sums[row]));
}

// All of the panel at once where its sums with few rows fit the registers, so that its memory is read in
// one direction; else as many of its rows as two registers hold.
template <typename Kind, int kRows>
void compute_rows(const Product& product, std::int32_t panel, std::int64_t first) {
  constexpr int kWhole = kPanelRows / kWidth;
  constexpr int kParts = kRows * kWhole <= kSumsMax ? kWhole : 2;
  alignas(64) float found[kRows][kPanelRows];
  for (std::int64_t begin = 0; begin < kPanelRows; begin += kParts * kWidth) {
    compute_part<Kind, kRows, kParts>(product, panel, first, begin, found);
  }
  for (int row = 0; row < kRows; ++row) {
    const Sums sums{load<Floats>(found[row]), load<Floats>(found[row] + kLanes)};
    store(product, first + row, std::int64_t{panel} * kPanelRows, sums);
  }
}

template <typename Kind, int kRows>
void compute_at_most(const Product& product, std::int32_t panel, std::int64_t first,
                     std::int64_t rows) {
  if (rows == kRows) {
    compute_rows<Kind, kRows>(product, panel, first);
  } else if constexpr (kRows > 1) {
    compute_at_most<Kind, kRows - 1>(product, panel, first, rows);
  }
}

// Rows in equal tiles: 13 are 7 and 6, not 12 and 1.
template <typename Kind>
void compute_panel(const Product& product, std::int32_t panel) {
  constexpr std::int64_t kRowsMax = kSumsMax / 2;
  const std::int64_t tiles = (product.rows + kRowsMax - 1) / kRowsMax;
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t first = product.rows * tile / tiles;
    const std::int64_t stop = product.rows * (tile + 1) / tiles;
    compute_at_most<Kind, kRowsMax>(product, panel, first, stop - first);
  }
}

}  // namespace

void float32_panel(const Product& product, std::int32_t panel) {
  compute_panel<Float32>(product, panel);
}

void bfloat16_panel(const Product& product, std::int32_t panel) {
  compute_panel<Bfloat16>(product, panel);
}

}  // namespace POLYCHIP_ISA
}  // namespace polychip

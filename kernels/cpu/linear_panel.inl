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

// Rows computed together: with two vectors each they fill the registers.
constexpr std::int64_t kRowsMax = POLYCHIP_ISA_ROWS;
// How far ahead of its use a weight is asked for.
constexpr std::ptrdiff_t kAheadBytes = 2048;

struct Float32 {
  using T = float;
  static constexpr std::int64_t kStep = 1;

  template <int kRows>
  static void add(Sums (&sums)[kRows], const T* weights, const T* input, std::int64_t stride) {
    const Floats low = load<Floats>(weights), high = load<Floats>(weights + kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Floats x = all_of(input[row * stride]);
      sums[row].low += low * x;
      sums[row].high += high * x;
    }
  }
};

struct Bfloat16 {
  using T = std::uint16_t;
  static constexpr std::int64_t kStep = 2;

  template <int kRows>
  static void add(Sums (&sums)[kRows], const T* weights, const T* input, std::int64_t stride) {
#if defined(__AVX512BF16__)
    const auto low = load<__m512bh>(weights), high = load<__m512bh>(weights + 2 * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const auto x = (__m512bh)_mm512_set1_epi32(load<std::int32_t>(input + row * stride));
      sums[row].low = _mm512_dpbf16_ps(sums[row].low, low, x);
      sums[row].high = _mm512_dpbf16_ps(sums[row].high, high, x);
    }
#else
    // A pair of numbers is the two halves of 32 bits; the upper half is a float32 as it stands.
    const auto low = load<Bits>(weights), high = load<Bits>(weights + 2 * kLanes);
    const auto even = [](Bits pairs) { return reinterpret_cast<Floats>(pairs << 16); };
    const auto odd = [](Bits pairs) { return reinterpret_cast<Floats>(pairs & 0xffff0000U); };
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Bits pair = spread<Bits>(load<std::uint32_t>(input + row * stride));
      const Floats first = even(pair), second = odd(pair);
      sums[row].low += even(low) * first;
      sums[row].high += even(high) * first;
      sums[row].low += odd(low) * second;
      sums[row].high += odd(high) * second;
    }
#endif
  }
};

template <typename Kind, int kRows>
void compute_rows(const Product& product, std::int32_t panel, std::int64_t first) {
  using T = typename Kind::T;
  const T* weights = reinterpret_cast<const T*>(product.weight->panel(panel));
  const T* input = static_cast<const T*>(product.input) + first * product.input_stride;
  const std::int64_t columns = product.weight->columns();
  Sums sums[kRows] = {};
  std::int64_t column = 0;
  for (; column + Kind::kStep <= columns; column += Kind::kStep) {
    __builtin_prefetch(reinterpret_cast<const std::byte*>(weights) + kAheadBytes);
    __builtin_prefetch(reinterpret_cast<const std::byte*>(weights) + kAheadBytes + 64);
    Kind::template add<kRows>(sums, weights, input + column, product.input_stride);
    weights += kPanelRows * Kind::kStep;
  }
  if (column < columns) {
    // The odd last one with a zero beside it: what follows in memory may be another row, or nothing.
    T last[kRows * Kind::kStep] = {};
    for (int row = 0; row < kRows; ++row) {
      last[row * Kind::kStep] = input[row * product.input_stride + column];
    }
    Kind::template add<kRows>(sums, weights, last, Kind::kStep);
  }
  for (int row = 0; row < kRows; ++row) {
    store(product, first + row, std::int64_t{panel} * kPanelRows, sums[row]);
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

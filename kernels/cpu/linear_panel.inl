// The kernels of linear.h in vectors of the compiler's, for one set of instructions: compiled once
// for each, in the namespace POLYCHIP_ISA.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

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
constexpr std::ptrdiff_t kLineBytes = 64;
// Two panels of this size leave half of a small second cache (512 KiB) to the activations.
constexpr std::ptrdiff_t kNearBytes = 128 << 10;

inline RegisterFloats in_all(float value) { return value - RegisterFloats{}; }

// Of some rows of the activations with some of the panel's, which are as many registers.
template <int kRows, int kParts>
using PartSums = RegisterFloats[kRows][kParts];

// One by one: what is copied as a whole the compiler keeps in memory.
template <int kRows, int kParts, typename Each>
void each_sum(Each each) {
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
    for (int part = 0; part < kParts; ++part) each(row, part);
  }
}

template <int kRows, int kParts>
void add_products(PartSums<kRows, kParts>& sums, const RegisterFloats (&parts)[kParts],
                  const float* input, std::int64_t stride) {
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
    const RegisterFloats x = in_all(input[row * stride]);
#pragma GCC unroll 16
    for (int part = 0; part < kParts; ++part) sums[row][part] += parts[part] * x;
  }
}

// Some rows of the activations, `stride` numbers apart: all columns, as they lie there.
template <typename T>
struct InPlace {
  using Number = T;
  static constexpr std::int64_t kColumns = std::numeric_limits<std::int64_t>::max();
  const T* numbers;
  std::int64_t stride;
  std::int64_t columns;

  InPlace(const T* input, std::int64_t input_stride, std::int64_t count)
      : numbers(input), stride(input_stride), columns(count) {}
};

// A block of them in float32, once for all of the panel's rows; an odd column has a zero beside it.
template <int kRows>
struct Widened {
  using Number = float;
  static constexpr std::int64_t kColumns = 512;
  alignas(64) float numbers[kRows * kColumns];
  static constexpr std::int64_t stride = kColumns;
  std::int64_t columns;

  Widened(const std::uint16_t* input, std::int64_t input_stride, std::int64_t count)
      : columns(count + count % 2) {
    for (int row = 0; row < kRows; ++row) {
      const std::uint16_t* from = input + row * input_stride;
      float* to = numbers + row * stride;
      std::int64_t done = 0;
      for (; done + kWidth <= count; done += kWidth) {
        const RegisterFloats wide = widened_part(from + done);
        std::memcpy(to + done, &wide, sizeof(wide));
      }
      if (done < count) {
        std::uint16_t rest[kWidth] = {};
        std::memcpy(rest, from + done, static_cast<std::size_t>(count - done) * sizeof(*from));
        const RegisterFloats wide = widened_part(rest);
        std::memcpy(to + done, &wide, sizeof(wide));
      }
    }
  }
};

struct Float32 {
  using T = float;
  template <int kRows>
  using Block = InPlace<T>;
  static constexpr std::int64_t kStep = 1;

  template <int kRows, int kParts>
  static void add(PartSums<kRows, kParts>& sums, const T* weights, const T* input,
                  std::int64_t stride) {
    RegisterFloats parts[kParts];
    for (int part = 0; part < kParts; ++part) {
      parts[part] = load<RegisterFloats>(weights + part * kWidth);
    }
    add_products(sums, parts, input, stride);
  }
};

struct Bfloat16 {
  using T = std::uint16_t;
  static constexpr std::int64_t kStep = 2;

#if defined(__AVX512BF16__)
  template <int kRows>
  using Block = InPlace<T>;

  template <int kRows, int kParts>
  static void add(PartSums<kRows, kParts>& sums, const T* weights, const T* input,
                  std::int64_t stride) {
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
  }
#else
  template <int kRows>
  using Block = Widened<kRows>;

  // A pair of weights is the two halves of 32 bits; the upper half is a float32 as it stands. First one
  // half of all, then the other, for want of registers.
  template <int kRows, int kParts>
  static void add(PartSums<kRows, kParts>& sums, const T* weights, const float* input,
                  std::int64_t stride) {
    RegisterFloats parts[kParts];
    for (int part = 0; part < kParts; ++part) {
      const RegisterBits pairs = load<RegisterBits>(weights + 2 * part * kWidth);
      parts[part] = reinterpret_cast<RegisterFloats>(pairs << 16);
    }
    add_products(sums, parts, input, stride);
    for (int part = 0; part < kParts; ++part) {
      const RegisterBits pairs = load<RegisterBits>(weights + 2 * part * kWidth);
      parts[part] = reinterpret_cast<RegisterFloats>(pairs & 0xffff0000U);
    }
    add_products(sums, parts, input + 1, stride);
  }
#endif
};

// What a pass over a panel fetches at each step, of one column in float32 or two in bfloat16.
//
// What the pass itself comes to, where rows in one tile leave the pace to the memory, or panels are
// large. Else the panel is in the nearest caches, and of the next one of this thread, which follows in
// memory, the first pass fetches one of a step's two lines and those after it the other.
struct Fetch {
  bool own;
  // From what the pass reads at the step.
  std::ptrdiff_t ahead_bytes;
};

template <std::ptrdiff_t kReadBytes>
inline void fetch_ahead(const Fetch& fetch, const void* weights) {
  const auto* there = static_cast<const std::byte*>(weights) + fetch.ahead_bytes;
  if (fetch.own) {
    for (std::ptrdiff_t line = 0; line < kReadBytes; line += kLineBytes) {
      __builtin_prefetch(there + line);
    }
  } else {
    __builtin_prefetch(there, 0, 2);
  }
}

// Adds to the products of some rows of the activations with those rows of the panel that begin at
// `begin` those of a block of columns.
template <typename Kind, int kRows, int kParts>
void add_part(const typename Kind::T* weights, std::int64_t begin,
              const typename Kind::template Block<kRows>& block, float (*found)[kPanelRows],
              const Fetch& fetch) {
  weights += begin * Kind::kStep;
  PartSums<kRows, kParts> sums;
  each_sum<kRows, kParts>([&](int row, int part) {
    sums[row][part] = load<RegisterFloats>(found[row] + begin + part * kWidth);
  });
  std::int64_t column = 0;
  for (; column + Kind::kStep <= block.columns; column += Kind::kStep) {
    fetch_ahead<kParts * kRegisterBytes>(fetch, weights);
    Kind::template add<kRows, kParts>(sums, weights, block.numbers + column, block.stride);
    weights += kPanelRows * Kind::kStep;
  }
  if (column < block.columns) {
    // The odd last one with a zero beside it: what follows in memory may be another row, or nothing.
    typename Kind::template Block<kRows>::Number last[kRows * Kind::kStep] = {};
    for (int row = 0; row < kRows; ++row) {
      last[row * Kind::kStep] = block.numbers[row * block.stride + column];
    }
    Kind::template add<kRows, kParts>(sums, weights, last, Kind::kStep);
  }
  each_sum<kRows, kParts>([&](int row, int part) {
    std::memcpy(found[row] + begin + part * kWidth, &sums[row][part], sizeof(RegisterFloats));
  });
}

// All of the panel at once where its sums with few rows fit the registers, so that its memory is read in
// one direction; else as many of its rows as two registers hold.
template <typename Kind, int kRows>
void compute_rows(const Product& product, std::int32_t panel, std::int64_t first, std::int64_t tile,
                  std::int64_t tiles) {
  using T = typename Kind::T;
  using Block = typename Kind::template Block<kRows>;
  constexpr int kWhole = kPanelRows / kWidth;
  constexpr int kParts = kRows * kWhole <= kSumsMax ? kWhole : 2;
  constexpr std::int64_t kPasses = kWhole / kParts;
  const bool own = tiles == 1 || product.weight->panel_bytes() > kNearBytes;
  const T* const weights = reinterpret_cast<const T*>(product.weight->panel(panel));
  const T* const input = static_cast<const T*>(product.input) + first * product.input_stride;
  const std::int64_t columns = product.weight->columns();
  alignas(64) float found[kRows][kPanelRows] = {};
  for (std::int64_t from = 0, count; from < columns; from += count) {
    count = std::min(Block::kColumns, columns - from);
    const Block block(input + from, product.input_stride, count);
    for (std::int64_t pass = 0; pass < kPasses; ++pass) {
      const std::int64_t begin = pass * kParts * kWidth;
      const std::ptrdiff_t line = tile + pass == 0 ? 0 : kLineBytes;
      const Fetch next{false, product.weight->panel_bytes() + line -
                                  begin * Kind::kStep * static_cast<std::ptrdiff_t>(sizeof(T))};
      add_part<Kind, kRows, kParts>(weights + from * kPanelRows, begin, block, found,
                                    own ? Fetch{true, kAheadBytes} : next);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    const Sums sums{load<Floats>(found[row]), load<Floats>(found[row] + kLanes)};
    store(product, first + row, std::int64_t{panel} * kPanelRows, sums);
  }
}

template <typename Kind, int kRows>
void compute_at_most(const Product& product, std::int32_t panel, std::int64_t first, std::int64_t rows,
                     std::int64_t tile, std::int64_t tiles) {
  if (rows == kRows) {
    compute_rows<Kind, kRows>(product, panel, first, tile, tiles);
  } else if constexpr (kRows > 1) {
    compute_at_most<Kind, kRows - 1>(product, panel, first, rows, tile, tiles);
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
    compute_at_most<Kind, kRowsMax>(product, panel, first, stop - first, tile, tiles);
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

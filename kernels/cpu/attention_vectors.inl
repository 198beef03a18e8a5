// The kernels of attention.h in vectors, for one set of instructions: compiled once for each, in the
// namespace POLYCHIP_ISA.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <vector>

#include "attention.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace polychip {
namespace POLYCHIP_ISA {
namespace {

#include "vectors.inl"

constexpr std::int64_t kTileTokens = 128;
constexpr std::int64_t kPairsAtOnce = kGroupPairs;

#include "attention.inl"

// Rows whose sums, of two vectors each, fill the registers.
constexpr std::int64_t kRowsMax = POLYCHIP_ISA_ROWS;

struct NoRegisters {};

template <typename Form, int kRows>
void multiply_rows(const Factors<typename Form::Left, typename Form::Source>& factors, std::int64_t row,
                   std::int64_t column) {
  const auto* left = factors.left + row * factors.left_stride;
  const auto* right = factors.right + column * Form::kDepth;
  float* to = factors.sums + row * factors.sums_stride + column;
  Vector low[kRows] = {}, high[kRows] = {};
  for (std::int64_t depth = 0; depth < factors.depth; depth += Form::kDepth) {
    Form::template add<kRows>(low, high, left + depth, factors.left_stride,
                              right + depth * factors.right_columns);
  }
  for (int i = 0; i < kRows; ++i) {
    put(low[i], to + i * factors.sums_stride);
    put(high[i], to + i * factors.sums_stride + kWidth);
  }
}

template <typename Form, int kRows>
void multiply_at_most(const Factors<typename Form::Left, typename Form::Source>& factors, std::int64_t row,
                      std::int64_t rows, std::int64_t column) {
  if (rows == kRows) {
    multiply_rows<Form, kRows>(factors, row, column);
  } else if constexpr (kRows > 1) {
    multiply_at_most<Form, kRows - 1>(factors, row, rows, column);
  }
}

// Two vectors of columns stay in the nearest cache for all rows, which are cut in equal parts.
template <typename Form>
void multiply_in_vectors(const Factors<typename Form::Left, typename Form::Source>& factors) {
  const std::int64_t parts = (factors.rows + kRowsMax - 1) / kRowsMax;
  for (std::int64_t column = 0; column < factors.columns; column += 2 * kWidth) {
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t first = factors.rows * part / parts;
      const std::int64_t stop = factors.rows * (part + 1) / parts;
      multiply_at_most<Form, kRowsMax>(factors, first, stop - first, column);
    }
  }
}

// Queries and weights in float32, whatever the cache has.
struct Wide {
  using Left = float;
  using Registers = NoRegisters;
  static constexpr bool kRough = false;

  static void put_weights(Vector first, Vector second, Left* to) {
    put(first, to);
    put(second, to + kWidth);
  }

  // Adds products of one number of each row, `stride` apart, with two vectors.
  template <int kRows>
  static void add_one(Vector (&low)[kRows], Vector (&high)[kRows], const Left* left,
                      std::int64_t stride, Vector first, Vector second) {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Vector x = left[row * stride] - Vector{};
      low[row] += first * x;
      high[row] += second * x;
    }
  }
};

struct WideFloat32 : Wide {
  using Source = float;
  static constexpr std::int64_t kDepth = 1, kDepthStep = 1;

  static void pack_query(const Source* query, std::int64_t size, Left* to) {
    std::memcpy(to, query, static_cast<std::size_t>(size) * sizeof(Left));
  }
  static void pack_values(const Source* const* values, std::int64_t size, Source* to) {
    std::memcpy(to, values[0], static_cast<std::size_t>(size) * sizeof(Source));
  }

  template <int kRows>
  static void add(Vector (&low)[kRows], Vector (&high)[kRows], const Left* left,
                  std::int64_t stride, const Source* right) {
    add_one<kRows>(low, high, left, stride, load<Vector>(right), load<Vector>(right + kWidth));
  }

  static void multiply(const Factors<Left, Source>& factors) {
    multiply_in_vectors<WideFloat32>(factors);
  }
};

// Keys and values stay pairs of bfloat16, half as much to write and to read again: a word's two halves
// become float32 in the register, the upper one as it stands.
struct WideBfloat16 : Wide, PairedSource {
  static constexpr std::int64_t kDepthStep = 2;

  static void pack_query(const Source* query, std::int64_t size, Left* to) {
    std::int64_t at = 0;
    for (; at + kWidth <= size; at += kWidth) put(widened_part(query + at), to + at);
    for (; at < size; ++at) to[at] = widened(query[at]);
  }

  template <int kRows>
  static void add(Vector (&low)[kRows], Vector (&high)[kRows], const Left* left,
                  std::int64_t stride, const Source* right) {
    const auto pairs = [&](int vector) { return load<RegisterBits>(right + vector * 2 * kWidth); };
    const auto lower = [](RegisterBits both) { return reinterpret_cast<Vector>(both << 16); };
    const auto upper = [](RegisterBits both) { return reinterpret_cast<Vector>(both & 0xffff0000U); };
    add_one<kRows>(low, high, left, stride, lower(pairs(0)), lower(pairs(1)));
    add_one<kRows>(low, high, left + 1, stride, upper(pairs(0)), upper(pairs(1)));
  }

  static void multiply(const Factors<Left, Source>& factors) {
    multiply_in_vectors<WideBfloat16>(factors);
  }
};

#if defined(__AVX512BF16__)
#include "attention_pairs.inl"

struct Narrow : Pairs {
  using Registers = NoRegisters;
  static constexpr std::int64_t kDepthStep = 2;

  template <int kRows>
  static void add(Vector (&low)[kRows], Vector (&high)[kRows], const Left* left,
                  std::int64_t stride, const Source* right) {
    const auto first = load<__m512bh>(right), second = load<__m512bh>(right + 2 * kWidth);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const auto x = (__m512bh)_mm512_set1_epi32(load<std::int32_t>(left + row * stride));
      low[row] = _mm512_dpbf16_ps(low[row], first, x);
      high[row] = _mm512_dpbf16_ps(high[row], second, x);
    }
  }

  static void multiply(const Factors<Left, Source>& factors) { multiply_in_vectors<Narrow>(factors); }
};
#endif

void piece(const AttentionPlan& plan, const AttentionPass& pass, const AttentionLayer& layer,
           std::int64_t index) {
  if (plan.step().number == Number::kFloat32) {
    compute_piece<WideFloat32>(plan, pass, layer, index);
    return;
  }
#if defined(__AVX512BF16__)
  // While AMD's Zen 4 multiplies one number of float32 it multiplies a pair, Intel's Sapphire Rapids a
  // quarter of one.
  if (__builtin_cpu_is("amd")) {
    compute_piece<Narrow>(plan, pass, layer, index);
    return;
  }
#endif
  compute_piece<WideBfloat16>(plan, pass, layer, index);
}

void merge(const AttentionPlan& plan, const AttentionPass& pass, const AttentionLayer& layer,
           std::int64_t index) {
  if (plan.step().number == Number::kFloat32) {
    merge_parts<WideFloat32>(plan, pass, layer, index);
  } else {
    merge_parts<WideBfloat16>(plan, pass, layer, index);
  }
}

}  // namespace

const AttentionKernels kAttentionKernels = {kTileTokens, piece, merge};

}  // namespace POLYCHIP_ISA
}  // namespace polychip

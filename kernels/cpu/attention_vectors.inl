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
void multiply_rows(const Factors<typename Form::Number>& factors, std::int64_t row,
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
void multiply_at_most(const Factors<typename Form::Number>& factors, std::int64_t row,
                      std::int64_t rows, std::int64_t column) {
  if (rows == kRows) {
    multiply_rows<Form, kRows>(factors, row, column);
  } else if constexpr (kRows > 1) {
    multiply_at_most<Form, kRows - 1>(factors, row, rows, column);
  }
}

// Two vectors of columns stay in the nearest cache for all rows, which are cut in equal parts.
template <typename Form>
void multiply_in_vectors(const Factors<typename Form::Number>& factors) {
  const std::int64_t parts = (factors.rows + kRowsMax - 1) / kRowsMax;
  for (std::int64_t column = 0; column < factors.columns; column += 2 * kWidth) {
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t first = factors.rows * part / parts;
      const std::int64_t stop = factors.rows * (part + 1) / parts;
      multiply_at_most<Form, kRowsMax>(factors, first, stop - first, column);
    }
  }
}

inline Vector widened_from(const std::uint16_t* numbers) {
#if POLYCHIP_ISA_WIDTH == 16
  return read(numbers);
#else
  typedef std::uint16_t VectorHalves __attribute__((vector_size(kWidth * sizeof(std::uint16_t))));
  return reinterpret_cast<Vector>(
      __builtin_convertvector(load<VectorHalves>(numbers), VectorInts) << 16);
#endif
}

// Operands of float32, whatever the cache has.
template <typename T>
struct Wide {
  using Source = T;
  using Number = float;
  using Registers = NoRegisters;
  static constexpr std::int64_t kDepth = 1, kDepthStep = 1;
  static constexpr bool kRough = false;

  static Number packed(Source number) {
    if constexpr (sizeof(Source) == sizeof(float)) {
      return number;
    } else {
      const std::uint32_t bits = std::uint32_t{number} << 16;
      return load<float>(&bits);
    }
  }

  // A word of the cache is a number of float32, or two whose bits are the upper half of one's.
  static void put_words(Four words, Number* to) {
    if constexpr (sizeof(Source) == sizeof(float)) {
      std::memcpy(to, &words, sizeof(words));
    } else {
      const Four first = words << 16, second = words & 0xffff0000U;
      std::memcpy(to, &first, sizeof(first));
      std::memcpy(to + kKeyColumns, &second, sizeof(second));
    }
  }

  static void pack_query(const Source* query, std::int64_t size, Number* to) {
    pack_values(&query, size, to);
  }

  static void pack_values(const Source* const* values, std::int64_t size, Number* to) {
    if constexpr (sizeof(Source) == sizeof(float)) {
      std::memcpy(to, values[0], static_cast<std::size_t>(size) * sizeof(Number));
    } else {
      std::int64_t at = 0;
      for (; at + kWidth <= size; at += kWidth) put(widened_from(values[0] + at), to + at);
      for (; at < size; ++at) to[at] = packed(values[0][at]);
    }
  }

  static void put_weights(Vector first, Vector second, Number* to) {
    put(first, to);
    put(second, to + kWidth);
  }

  template <int kRows>
  static void add(Vector (&low)[kRows], Vector (&high)[kRows], const Number* left,
                  std::int64_t stride, const Number* right) {
    const Vector first = load<Vector>(right), second = load<Vector>(right + kWidth);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const Vector x = left[row * stride] - Vector{};
      low[row] += first * x;
      high[row] += second * x;
    }
  }

  static void multiply(const Factors<Number>& factors) { multiply_in_vectors<Wide>(factors); }
};

#if defined(__AVX512BF16__)
#include "attention_pairs.inl"

struct Narrow : Pairs {
  using Registers = NoRegisters;
  static constexpr std::int64_t kDepthStep = 2;

  template <int kRows>
  static void add(Vector (&low)[kRows], Vector (&high)[kRows], const Number* left,
                  std::int64_t stride, const Number* right) {
    const auto first = load<__m512bh>(right), second = load<__m512bh>(right + 2 * kWidth);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const auto x = (__m512bh)_mm512_set1_epi32(load<std::int32_t>(left + row * stride));
      low[row] = _mm512_dpbf16_ps(low[row], first, x);
      high[row] = _mm512_dpbf16_ps(high[row], second, x);
    }
  }

  static void multiply(const Factors<Number>& factors) { multiply_in_vectors<Narrow>(factors); }
};
#endif

void piece(const AttentionPlan& plan, const AttentionPass& pass, const AttentionLayer& layer,
           std::int64_t index) {
  if (plan.step().number == Number::kFloat32) {
    compute_piece<Wide<float>>(plan, pass, layer, index);
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
  compute_piece<Wide<std::uint16_t>>(plan, pass, layer, index);
}

void merge(const AttentionPlan& plan, const AttentionPass& pass, const AttentionLayer& layer,
           std::int64_t index) {
  if (plan.step().number == Number::kFloat32) {
    merge_parts<Wide<float>>(plan, pass, layer, index);
  } else {
    merge_parts<Wide<std::uint16_t>>(plan, pass, layer, index);
  }
}

}  // namespace

const AttentionKernels kAttentionKernels = {kTileTokens, piece, merge};

}  // namespace POLYCHIP_ISA
}  // namespace polychip

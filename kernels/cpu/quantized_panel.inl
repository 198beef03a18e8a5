// The kernels of quantized.h for one set of instructions: compiled once for each, in the namespace
// POLYCHIP_ISA.

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "quantized.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace polychip {
namespace POLYCHIP_ISA {
namespace {

#include "panel_store.inl"
#include "quantized_sums.inl"

// Rows computed together.
constexpr int kRowsMax = POLYCHIP_ISA_ROWS;
// How far ahead of its use a weight is asked for.
constexpr std::ptrdiff_t kAheadBytes = 2048;
constexpr int kSteps = 8;
constexpr int kStepBytes = 4;
constexpr int kHalfBytes = kGroupColumns / 2;
// Numbers in a register.
constexpr int kWidth = kRegisterBytes / sizeof(float);

// Of some rows of the activations one group: its numbers, and their sums times the offset.
template <int kRows>
struct Group {
  const std::int8_t* numbers[kRows];
  std::int32_t excess[kRows];
};

template <typename Kind, int kRows>
inline Group<kRows> group_of(const Activations& activations, std::int64_t first, std::int64_t place) {
  Group<kRows> group;
  for (int row = 0; row < kRows; ++row) {
    group.numbers[row] = activations.numbers(first + row) + place * kGroupColumns;
    group.excess[row] = Kind::kOffset * activations.sums(first + row)[place];
  }
  return group;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
inline RegisterFloats scales_at(const std::byte* halves) {
  return reinterpret_cast<RegisterFloats>(_mm256_cvtph_ps(load<__m128i>(halves)));
}

// Without it the compiler adds integers as a tree, and keeps many products in memory for that.
inline void in_order(__m256i& sums) { asm("" : "+x"(sums)); }

// The sums of products of a group with eight rows, as float32, in which they are exact.
template <typename Kind, int kRows>
inline void multiply(RegisterFloats (&dots)[kRows], const std::byte* weights,
                     const Group<kRows>& group) {
  const __m256i ones = _mm256_set1_epi16(1);
  const auto all_of_step = [&](int row, int place) {
    return _mm256_set1_epi32(load<std::int32_t>(group.numbers[row] + place));
  };
  __m256i sums[kRows];
  if constexpr (Kind::kBits == 8) {
    for (int row = 0; row < kRows; ++row) sums[row] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step, weights += 128) {
      // The weight's sign goes to the activation: 2 * 128 * 127 fits 16 bits, 2 * 255 * 127 not.
      const __m256i number = _mm256_xor_si256(load<__m256i>(weights), _mm256_set1_epi8(-128));
      const __m256i size = _mm256_abs_epi8(number);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const __m256i x = _mm256_sign_epi8(all_of_step(row, step * kStepBytes), number);
        const __m256i pairs = _mm256_maddubs_epi16(size, x);
        sums[row] = _mm256_add_epi32(sums[row], _mm256_madd_epi16(pairs, ones));
        in_order(sums[row]);
      }
    }
  } else {
    // 8 * 2 * 15 * 127 fits 16 bits.
    __m256i pairs[kRows];
    for (int row = 0; row < kRows; ++row) pairs[row] = _mm256_setzero_si256();
    const __m256i mask = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int step = 0; step < kSteps / 2; ++step, weights += 128) {
      const __m256i both = load<__m256i>(weights);
      const __m256i lower = _mm256_and_si256(both, mask);
      const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const __m256i x = all_of_step(row, step * kStepBytes);
        const __m256i y = all_of_step(row, kHalfBytes + step * kStepBytes);
        pairs[row] = _mm256_add_epi16(pairs[row], _mm256_maddubs_epi16(lower, x));
        pairs[row] = _mm256_add_epi16(pairs[row], _mm256_maddubs_epi16(upper, y));
        in_order(pairs[row]);
      }
    }
    for (int row = 0; row < kRows; ++row) {
      sums[row] = _mm256_sub_epi32(_mm256_madd_epi16(pairs[row], ones),
                                   _mm256_set1_epi32(group.excess[row]));
    }
  }
  for (int row = 0; row < kRows; ++row) dots[row] = _mm256_cvtepi32_ps(sums[row]);
}

// Group after group, so that the panel's memory is read in one direction, and in each eight rows of the
// panel at a time, for want of registers: the sums wait in memory, where they are needed once a group.
template <typename Kind, int kRows>
void compute_rows(const Product& product, const Activations& activations, std::int32_t panel,
                  std::int64_t first) {
  const std::byte* weights = product.weight->panel(panel);
  alignas(64) float found[kRows][kPanelRows] = {};
  for (std::int64_t place = 0; place < activations.groups(); ++place, weights += kGroupBytes<Kind>) {
    for (std::size_t line = 0; line < kGroupBytes<Kind>; line += 64) {
      __builtin_prefetch(weights + kAheadBytes + line);
    }
    const auto group = group_of<Kind, kRows>(activations, first, place);
    for (std::int64_t begin = 0; begin < kPanelRows; begin += kWidth) {
      RegisterFloats dots[kRows];
      multiply<Kind, kRows>(dots, weights + kStepBytes * begin, group);
      const std::byte* scales = weights + kNumbersBytes<Kind> + sizeof(std::uint16_t) * begin;
      const RegisterFloats scale = scales_at(scales);
      for (int row = 0; row < kRows; ++row) {
        const float all = activations.scales(first + row)[place];
        RegisterFloats sum = load<RegisterFloats>(found[row] + begin);
        sum += dots[row] * (scale * (all - RegisterFloats{}));
        if constexpr (Kind::kMinima) {
          const auto least = scales_at(scales + 2 * kPanelRows);
          const float size = all * static_cast<float>(activations.sums(first + row)[place]);
          sum += least * (size - RegisterFloats{});
        }
        std::memcpy(found[row] + begin, &sum, sizeof(sum));
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    const Sums sums{load<Floats>(found[row]), load<Floats>(found[row] + kLanes)};
    store(product, first + row, std::int64_t{panel} * kPanelRows, sums);
  }
}
#else
// The sums of products of a group with the panel's 32 rows, as float32, in which they are exact.
template <typename Kind, int kRows>
inline void multiply(Sums (&dots)[kRows], const std::byte* weights, const Group<kRows>& group) {
#if defined(__AVX512VNNI__)
  __m512i low[kRows], high[kRows];
  for (int row = 0; row < kRows; ++row) low[row] = high[row] = _mm512_set1_epi32(-group.excess[row]);
  const auto add = [&](__m512i first, __m512i second, int place) {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const __m512i x = _mm512_set1_epi32(load<std::int32_t>(group.numbers[row] + place));
      low[row] = _mm512_dpbusd_epi32(low[row], first, x);
      high[row] = _mm512_dpbusd_epi32(high[row], second, x);
    }
  };
  if constexpr (Kind::kBits == 8) {
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step, weights += 128) {
      add(load<__m512i>(weights), load<__m512i>(weights + 64), step * kStepBytes);
    }
  } else {
    const __m512i mask = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int step = 0; step < kSteps / 2; ++step, weights += 128) {
      const auto first = load<Bits>(weights), second = load<Bits>(weights + 64);
      const auto lower = [&](Bits both) { return reinterpret_cast<__m512i>(both) & mask; };
      add(lower(first), lower(second), step * kStepBytes);
      add(lower(first >> 4), lower(second >> 4), kHalfBytes + step * kStepBytes);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    dots[row].low = __builtin_convertvector(reinterpret_cast<Ints>(low[row]), Floats);
    dots[row].high = __builtin_convertvector(reinterpret_cast<Ints>(high[row]), Floats);
  }
#else
  for (int row = 0; row < kRows; ++row) {
    dots[row].low = dots[row].high = all_of(static_cast<float>(-group.excess[row]));
  }
  // Column `i` of the four or, by halves of bytes, eight whose weights are in a word.
  const auto add = [&](Bits low, Bits high, int shift, int place) {
    const auto number = [&](Bits words) {
      constexpr std::uint32_t kMask = (1U << Kind::kBits) - 1;
      return __builtin_convertvector(reinterpret_cast<Ints>((words >> shift) & kMask), Floats);
    };
    const Floats first = number(low), second = number(high);
    for (int row = 0; row < kRows; ++row) {
      const Floats x = all_of(group.numbers[row][place]);
      dots[row].low += first * x;
      dots[row].high += second * x;
    }
  };
  for (int step = 0; step < kSteps * Kind::kBits / 8; ++step, weights += 128) {
    const auto low = load<Bits>(weights), high = load<Bits>(weights + 64);
    for (int i = 0; i < kStepBytes; ++i) {
      add(low, high, 8 * i, step * kStepBytes + i);
      if constexpr (Kind::kBits == 4) add(low, high, 8 * i + 4, kHalfBytes + step * kStepBytes + i);
    }
  }
#endif
}

template <typename Kind, int kRows>
void compute_rows(const Product& product, const Activations& activations, std::int32_t panel,
                  std::int64_t first) {
  const std::byte* weights = product.weight->panel(panel);
  Sums sums[kRows] = {};
  for (std::int64_t place = 0; place < activations.groups(); ++place) {
    for (std::size_t line = 0; line < kGroupBytes<Kind>; line += 64) {
      __builtin_prefetch(weights + kAheadBytes + line);
    }
    const auto group = group_of<Kind, kRows>(activations, first, place);
    Sums dots[kRows];
    multiply<Kind, kRows>(dots, weights, group);
    const Scales<Kind> scales(weights);
    for (int row = 0; row < kRows; ++row) {
      scales.add(sums[row], dots[row], activations.scales(first + row)[place],
                 activations.sums(first + row)[place]);
    }
    weights += kGroupBytes<Kind>;
  }
  for (int row = 0; row < kRows; ++row) {
    store(product, first + row, std::int64_t{panel} * kPanelRows, sums[row]);
  }
}
#endif

template <typename Kind, int kRows>
void compute_at_most(const Product& product, const Activations& activations, std::int32_t panel,
                     std::int64_t first, std::int64_t rows) {
  if (rows == kRows) {
    compute_rows<Kind, kRows>(product, activations, panel, first);
  } else if constexpr (kRows > 1) {
    compute_at_most<Kind, kRows - 1>(product, activations, panel, first, rows);
  }
}

// Rows in equal tiles: 7 are 4 and 3, not 6 and 1.
void quantized_panel(const Product& product, const Activations& activations, std::int32_t panel) {
  const std::int64_t tiles = (product.rows + kRowsMax - 1) / kRowsMax;
  with_quantized(product.weight->form(), [&](auto kind) {
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t first = product.rows * tile / tiles;
      const std::int64_t stop = product.rows * (tile + 1) / tiles;
      compute_at_most<decltype(kind), kRowsMax>(product, activations, panel, first, stop - first);
    }
  });
}

constexpr int kParts = kGroupColumns / kWidth;

// 32 numbers by registers, those behind the first `count` zero.
template <typename T>
inline void read_columns(const T* from, std::int64_t count, RegisterFloats (&parts)[kParts]) {
  T numbers[kGroupColumns];
  if (count < kGroupColumns) {
    std::fill_n(numbers, kGroupColumns, T{0});
    std::memcpy(numbers, from, static_cast<std::size_t>(count) * sizeof(T));
    from = numbers;
  }
  for (int part = 0; part < kParts; ++part) {
    if constexpr (sizeof(T) == sizeof(float)) {
      parts[part] = load<RegisterFloats>(from + part * kWidth);
    } else {
      parts[part] = widened_part(from + part * kWidth);
    }
  }
}

// Whole numbers of a signed byte's range.
inline void write_bytes(const RegisterInts (&parts)[kParts], std::int8_t* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // The compiler would do it number by number.
  const auto part = [&](int i) { return reinterpret_cast<__m256i>(parts[i]); };
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(part(0), part(1)),
                                            _mm256_packs_epi32(part(2), part(3)));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(packed, order);
  std::memcpy(to, &bytes, sizeof(bytes));
#else
  typedef std::int8_t PartBytes __attribute__((vector_size(kWidth)));
  for (int part = 0; part < kParts; ++part) {
    const PartBytes bytes = __builtin_convertvector(parts[part], PartBytes);
    std::memcpy(to + part * kWidth, &bytes, sizeof(bytes));
  }
#endif
}

// A group of activations in 8 bits.
template <typename T>
void quantize_group(const T* from, std::int64_t count, std::int8_t* numbers, float& scale,
                    std::int32_t& sum) {
  RegisterFloats parts[kParts];
  read_columns(from, count, parts);
  // As integers, sizes are in the same order; infinity and, after it, NaN come last.
  RegisterInts sizes = {};
  for (const RegisterFloats& part : parts) {
    const RegisterInts size = reinterpret_cast<RegisterInts>(part) & 0x7fffffff;
    sizes = size > sizes ? size : sizes;
  }
  std::int32_t bits = 0;
  for (int lane = 0; lane < kWidth; ++lane) bits = std::max(bits, sizes[lane]);
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  // What is next to nothing is none: its inverse would be out of range.
  constexpr float kLeast = 1e-36f;
  scale = largest < kLeast ? 0.0f : largest * (1.0f / 127.0f);
  if (!(largest < __builtin_inff())) {
    // No integers stand for them: the scale makes what they should of any product.
    std::fill_n(numbers, kGroupColumns, std::int8_t{0});
    scale = __builtin_nanf("");
    sum = 0;
    return;
  }
  const float inverse = largest < kLeast ? 0.0f : 127.0f / largest;
  RegisterInts whole[kParts], total = {};
  for (int part = 0; part < kParts; ++part) {
    // To the nearest: beyond 2^23 a float32 has no fraction.
    constexpr float kNoFraction = 12582912.0f;
    whole[part] =
        __builtin_convertvector(parts[part] * inverse + kNoFraction - kNoFraction, RegisterInts);
    total += whole[part];
  }
  write_bytes(whole, numbers);
  sum = 0;
  for (int lane = 0; lane < kWidth; ++lane) sum += total[lane];
}

template <typename T>
void quantize_rows(const Product& product, const Activations& activations, std::int64_t first,
                   std::int64_t stop) {
  const std::int64_t columns = product.weight->columns();
  for (std::int64_t row = first; row < stop; ++row) {
    const T* input = static_cast<const T*>(product.input) + row * product.input_stride;
    for (std::int64_t place = 0; place < activations.groups(); ++place) {
      const std::int64_t column = place * kGroupColumns;
      quantize_group(input + column, std::min(kGroupColumns, columns - column),
                     activations.numbers(row) + column, activations.scales(row)[place],
                     activations.sums(row)[place]);
    }
  }
}

void quantize(const Product& product, const Activations& activations, std::int64_t first,
              std::int64_t stop) {
  if (product.weight->number() == Number::kFloat32) {
    quantize_rows<float>(product, activations, first, stop);
  } else {
    quantize_rows<std::uint16_t>(product, activations, first, stop);
  }
}

}  // namespace

const QuantizedKernels kQuantizedKernels = {quantize, quantized_panel};

}  // namespace POLYCHIP_ISA
}  // namespace polychip

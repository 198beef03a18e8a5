// Products of many rows in the tile registers: 16 rows of activations times 16 rows of the weight, one
// group of 32 columns deep.
//
//             B0  B1     a group of the panel, with the sign it has in the weight
//   A  [16]   C0  C1     up to 64 rows of activations one after the other, while B stays
//
// The integers are those that the vectors compute, and so is what follows: a row's result is the same
// to the bit whether it is computed here or, among few, there.
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "quantized.h"

namespace polychip {
namespace amx {
namespace {

#include "panel_store.inl"
#include "quantized_sums.inl"

// Below it the vectors are faster.
constexpr std::int64_t kRowsLeast = 8;
constexpr std::int64_t kRowsMax = 64;
constexpr std::int64_t kTileRows = kActivationRows;
constexpr int kRowBytes = 64;
constexpr int kSteps = 8;
constexpr std::ptrdiff_t kAheadBytes = 4096;

struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// The intrinsics do not say that they read what they are pointed to.
void written(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// Each time anew: what else runs in this thread may use tiles of other shapes.
void shape_tiles() {
  TileShapes shapes;
  for (const int sums : {0, 1}) {
    shapes.rows[sums] = kTileRows;
    shapes.row_bytes[sums] = kRowBytes;
  }
  shapes.rows[4] = kTileRows;
  shapes.row_bytes[4] = kGroupColumns;
  for (const int weights : {6, 7}) {
    shapes.rows[weights] = kSteps;
    shapes.row_bytes[weights] = kRowBytes;
  }
  written(&shapes);
  _tile_loadconfig(&shapes);
}

// The weights of a group without its offset: [8 steps][32 rows][4 columns].
template <typename Kind>
void expand(const std::byte* group, std::int8_t (&weights)[kSteps][2 * kRowBytes]) {
  const auto offset = _mm512_set1_epi8(static_cast<char>(Kind::kOffset));
  const auto put = [&](int step, int half, __m512i numbers) {
    const __m512i less = _mm512_sub_epi8(numbers, offset);
    std::memcpy(weights[step] + half * kRowBytes, &less, sizeof(less));
  };
  for (int half = 0; half < 2; ++half) {
    if constexpr (Kind::kBits == 8) {
#pragma GCC unroll 8
      for (int step = 0; step < kSteps; ++step) {
        put(step, half, load<__m512i>(group + (2 * step + half) * kRowBytes));
      }
    } else {
      const auto mask = _mm512_set1_epi8(15);
#pragma GCC unroll 4
      for (int step = 0; step < kSteps / 2; ++step) {
        const auto both = load<Bits>(group + (2 * step + half) * kRowBytes);
        put(step, half, reinterpret_cast<__m512i>(both) & mask);
        put(step + kSteps / 2, half, reinterpret_cast<__m512i>(both >> 4) & mask);
      }
    }
  }
}

// Of a group, for tiles of rows: [tile][half of the panel][row][16 rows of the weight].
typedef std::int32_t Dots[kRowsMax / kTileRows][2][kTileRows][kLanes];

template <typename Kind>
void multiply(const Activations& activations, const std::byte* group, std::int64_t place,
              std::int64_t first, std::int64_t rows, Dots& dots) {
  alignas(64) std::int8_t weights[kSteps][2 * kRowBytes];
  expand<Kind>(group, weights);
  written(weights);
  _tile_loadd(6, weights, 2 * kRowBytes);
  _tile_loadd(7, weights[0] + kRowBytes, 2 * kRowBytes);
  for (std::int64_t tile = 0; tile * kTileRows < rows; ++tile) {
    _tile_loadd(4, activations.numbers(first + tile * kTileRows) + place * kGroupColumns,
                activations.groups() * kGroupColumns);
    _tile_zero(0);
    _tile_zero(1);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_stored(0, dots[tile][0], kRowBytes);
    _tile_stored(1, dots[tile][1], kRowBytes);
  }
}

template <typename Kind>
void add(const Activations& activations, const std::byte* group, std::int64_t place, std::int64_t first,
         std::int64_t rows, const Dots& dots, Sums* sums) {
  const Scales<Kind> scales(group);
  for (std::int64_t tile = 0; tile * kTileRows < rows; ++tile) {
    const std::int64_t start = tile * kTileRows, count = std::min(rows - start, kTileRows);
    const auto& tile_dots = dots[tile];
    for (std::int64_t row = 0; row < count; ++row) {
      const Sums found = {__builtin_convertvector(load<Ints>(tile_dots[0][row]), Floats),
                          __builtin_convertvector(load<Ints>(tile_dots[1][row]), Floats)};
      scales.add(sums[start + row], found, activations.scales(first + start + row)[place],
                 activations.sums(first + start + row)[place]);
    }
  }
}

template <typename Kind>
void compute_rows(const Product& product, const Activations& activations, std::int32_t panel,
                  std::int64_t first, std::int64_t rows) {
  const std::byte* group = product.weight->panel(panel);
  Sums sums[kRowsMax];
  std::fill_n(sums, rows, Sums{});
  // While the tiles compute a group, the vectors add the one before it.
  alignas(64) Dots dots[2];
  for (std::int64_t place = 0; place <= activations.groups(); ++place) {
    if (place < activations.groups()) {
      for (std::size_t line = 0; line < kGroupBytes<Kind>; line += kRowBytes) {
        __builtin_prefetch(group + kAheadBytes + line);
      }
      multiply<Kind>(activations, group, place, first, rows, dots[place % 2]);
    }
    if (place > 0) {
      add<Kind>(activations, group - kGroupBytes<Kind>, place - 1, first, rows,
                dots[(place - 1) % 2], sums);
    }
    group += kGroupBytes<Kind>;
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    store(product, first + row, std::int64_t{panel} * kPanelRows, sums[row]);
  }
}

}  // namespace

void quantized_panel(const Product& product, const Activations& activations, std::int32_t panel) {
  if (product.rows < kRowsLeast) {
    avx512::kQuantizedKernels.panel(product, activations, panel);
    return;
  }
  shape_tiles();
  with_quantized(product.weight->form(), [&](auto kind) {
    for (std::int64_t first = 0; first < product.rows; first += kRowsMax) {
      const std::int64_t rows = std::min(product.rows - first, kRowsMax);
      compute_rows<decltype(kind)>(product, activations, panel, first, rows);
    }
  });
  _tile_release();
}

}  // namespace amx
}  // namespace polychip

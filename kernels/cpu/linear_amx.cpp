// Products in the tile registers: 16 rows of activations times 16 rows of the weight, 32 columns deep.
//
//            B0  B1     two tiles of the panel, side by side in each of its lines
//   A0 [16]  C0  C1     up to 32 rows of activations at a time
//   A1 [16]  C2  C3
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "linear.h"

namespace polychip {
namespace amx {
namespace {

#include "panel_store.inl"

constexpr int kTileRows = 16;
constexpr int kRowBytes = 64;
constexpr std::int64_t kLineNumbers = kPanelRows * 2;
constexpr std::int64_t kTileNumbers = kTileRows * kLineNumbers;
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

// Anew for each panel: what else runs in this thread may use tiles of other shapes. It takes as long as a
// dozen products.
void shape_tiles(int upper, int lower) {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.row_bytes[tile] = kRowBytes;
  const auto above = static_cast<std::uint8_t>(upper);
  const auto below = static_cast<std::uint8_t>(std::max(lower, 1));
  shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = above;
  shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = below;
  shapes.rows[6] = shapes.rows[7] = kTileRows;
  written(&shapes);
  _tile_loadconfig(&shapes);
}

// The activations of 32 columns: as they lie there, or copied where the columns end earlier, for what
// follows in memory may be another row, or nothing.
struct Activations {
  const std::uint16_t* numbers;
  std::size_t stride_bytes;
};

Activations at(const Product& product, std::int64_t first, int rows, std::int64_t column,
               std::uint16_t* room) {
  const auto* input = static_cast<const std::uint16_t*>(product.input);
  const std::int64_t left = product.weight->columns() - column;
  const std::uint16_t* numbers = input + first * product.input_stride + column;
  if (left >= kColumnTile) {
    return {numbers, static_cast<std::size_t>(product.input_stride) * sizeof(std::uint16_t)};
  }
  for (int row = 0; row < rows; ++row) {
    std::uint16_t* padded = room + row * kColumnTile;
    std::memset(padded, 0, kRowBytes);
    std::memcpy(padded, numbers + row * product.input_stride,
                static_cast<std::size_t>(left) * sizeof(std::uint16_t));
  }
  written(room);
  return {room, kRowBytes};
}

// Fetches what of the weights comes next, a part at each step along the columns.
//
// Few rows: all of it, a little ahead, for the memory sets the pace. Many rows go over the panel several
// times, in the nearest caches, and meanwhile fetch a part each of the next panel of this thread, which
// follows in memory.
class Prefetch {
 public:
  Prefetch(std::int64_t passes, std::ptrdiff_t panel_bytes)
      : passes_(passes),
        lines_((kLines + passes - 1) / passes),
        ahead_bytes_(passes == 1 ? kAheadBytes : panel_bytes) {}

  void operator()(const std::uint16_t* weights, std::int64_t pass) const {
    const auto* ahead = reinterpret_cast<const std::byte*>(weights) + ahead_bytes_;
    if (passes_ == 1) {
#pragma GCC unroll 32
      for (std::ptrdiff_t line = 0; line < kLines; ++line) __builtin_prefetch(ahead + line * kRowBytes);
      return;
    }
    const std::int64_t first = pass * lines_, stop = std::min(first + lines_, kLines);
    for (std::int64_t line = first; line < stop; ++line) {
      _mm_prefetch(reinterpret_cast<const char*>(ahead + line * kRowBytes), _MM_HINT_T1);
    }
  }

 private:
  static constexpr std::int64_t kLines = 2 * kTileRows;

  std::int64_t passes_;
  std::int64_t lines_;
  std::ptrdiff_t ahead_bytes_;
};

template <bool kTwo>
void multiply(const Product& product, const std::uint16_t* weights, std::int64_t first, int upper,
              int lower, const Prefetch& prefetch, std::int64_t pass) {
  alignas(64) std::uint16_t room[2 * kTileRows * kColumnTile];
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const std::int64_t columns = product.weight->padded_columns();
  for (std::int64_t column = 0; column < columns; column += kColumnTile, weights += kTileNumbers) {
    prefetch(weights, pass);
    _tile_loadd(6, weights, 2 * kRowBytes);
    _tile_loadd(7, weights + kColumnTile, 2 * kRowBytes);
    const Activations above = at(product, first, upper, column, room);
    _tile_loadd(4, above.numbers, above.stride_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      const Activations below =
          at(product, first + kTileRows, lower, column, room + kTileRows * kColumnTile);
      _tile_loadd(5, below.numbers, below.stride_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

}  // namespace

void bfloat16_panel(const Product& product, std::int32_t panel) {
  if (product.rows == 0) return;
  const auto* weights = reinterpret_cast<const std::uint16_t*>(product.weight->panel(panel));
  const std::int64_t passes = (product.rows + 2 * kTileRows - 1) / (2 * kTileRows);
  const Prefetch prefetch(passes, product.weight->panel_bytes());
  alignas(64) float sums[2 * kTileRows][kPanelRows];
  int shaped = 0;
  for (std::int64_t pass = 0; pass < passes; ++pass) {
    const std::int64_t first = pass * 2 * kTileRows;
    const auto left = static_cast<int>(std::min<std::int64_t>(product.rows - first, 2 * kTileRows));
    const int upper = std::min(left, kTileRows), lower = left - upper;
    if (left != shaped) shape_tiles(upper, lower);
    shaped = left;
    if (lower > 0) {
      multiply<true>(product, weights, first, upper, lower, prefetch, pass);
      _tile_stored(2, sums[kTileRows], sizeof(sums[0]));
      _tile_stored(3, &sums[kTileRows][kLanes], sizeof(sums[0]));
    } else {
      multiply<false>(product, weights, first, upper, lower, prefetch, pass);
    }
    _tile_stored(0, sums[0], sizeof(sums[0]));
    _tile_stored(1, &sums[0][kLanes], sizeof(sums[0]));
    for (int row = 0; row < left; ++row) {
      const Sums found = {load<Floats>(sums[row]), load<Floats>(&sums[row][kLanes])};
      store(product, first + row, std::int64_t{panel} * kPanelRows, found);
    }
  }
  _tile_release();
}

}  // namespace amx
}  // namespace polychip

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

// Each time anew: what else runs in this thread may use tiles of other shapes.
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

void prefetch_tile(const std::uint16_t* weights) {
  const auto* ahead = reinterpret_cast<const std::byte*>(weights) + kAheadBytes;
#pragma GCC unroll 32
  for (std::ptrdiff_t line = 0; line < 2 * kTileRows; ++line) {
    __builtin_prefetch(ahead + line * kRowBytes);
  }
}

template <bool kTwo>
void multiply(const Product& product, const std::uint16_t* weights, std::int64_t first, int upper,
              int lower) {
  alignas(64) std::uint16_t room[2 * kTileRows * kColumnTile];
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  const std::int64_t columns = product.weight->padded_columns();
  for (std::int64_t column = 0; column < columns; column += kColumnTile, weights += kTileNumbers) {
    prefetch_tile(weights);
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
  const auto* weights = reinterpret_cast<const std::uint16_t*>(product.weight->panel(panel));
  alignas(64) float sums[2 * kTileRows][kPanelRows];
  for (std::int64_t first = 0; first < product.rows; first += 2 * kTileRows) {
    const auto left = static_cast<int>(std::min<std::int64_t>(product.rows - first, 2 * kTileRows));
    const int upper = std::min(left, kTileRows), lower = left - upper;
    shape_tiles(upper, lower);
    if (lower > 0) {
      multiply<true>(product, weights, first, upper, lower);
      _tile_stored(2, sums[kTileRows], sizeof(sums[0]));
      _tile_stored(3, &sums[kTileRows][kLanes], sizeof(sums[0]));
    } else {
      multiply<false>(product, weights, first, upper, lower);
    }
    _tile_stored(0, sums[0], sizeof(sums[0]));
    _tile_stored(1, &sums[0][kLanes], sizeof(sums[0]));
    for (int row = 0; row < left; ++row) {
      store(product, first + row, std::int64_t{panel} * kPanelRows,
            {load<Floats>(sums[row]), load<Floats>(&sums[row][kLanes])});
    }
  }
  _tile_release();
}

}  // namespace amx
}  // namespace polychip

// The kernels of attention.h in the tile registers: 16 pairs times 16 tokens, or columns, 32 deep.
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <vector>

#include "attention.h"

#define POLYCHIP_ISA_WIDTH 16

namespace polychip {
namespace amx {
namespace {

#include "vectors.inl"

// So few that what a group needs stays in the nearest cache: tile registers read all of it again and
// again.
constexpr std::int64_t kTileTokens = 64;
constexpr std::int64_t kPairsAtOnce = kTilePairs;

#include "attention.inl"

#include "attention_pairs.inl"

constexpr std::size_t kRowBytes = 64;

struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// The intrinsics do not say that they read and write what they are pointed to.
void in_order() { asm volatile("" : : : "memory"); }

struct TileRegisters {
  TileRegisters() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.row_bytes[tile] = kRowBytes;
      shapes.rows[tile] = kTilePairs;
    }
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
  }
  ~TileRegisters() { _tile_release(); }
};

// 16 rows of two tiles of columns.
void multiply_tiles(const Factors<std::uint16_t, std::uint16_t>& factors, std::int64_t row,
                    std::int64_t column) {
  const auto left_bytes = static_cast<std::size_t>(factors.left_stride) * sizeof(std::uint16_t);
  const auto right_bytes = static_cast<std::size_t>(factors.right_columns) * sizeof(std::uint32_t);
  const auto sums_bytes = static_cast<std::size_t>(factors.sums_stride) * sizeof(float);
  const std::uint16_t* left = factors.left + row * factors.left_stride;
  const std::uint16_t* right = factors.right + 2 * column;
  float* sums = factors.sums + row * factors.sums_stride + column;
  _tile_zero(0);
  _tile_zero(1);
  for (std::int64_t depth = 0; depth < factors.depth; depth += kTileStep) {
    _tile_loadd(6, right + depth * factors.right_columns, right_bytes);
    _tile_loadd(7, right + depth * factors.right_columns + 2 * kLanes, right_bytes);
    _tile_loadd(4, left + depth, left_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums, sums_bytes);
  _tile_stored(1, sums + kLanes, sums_bytes);
}

// Rows in whole tiles: what those beyond the last one hold is nobody's.
struct Tiles : Pairs {
  using Registers = TileRegisters;
  static constexpr std::int64_t kDepthStep = kTileStep;

  static void multiply(const Factors<Left, Source>& factors) {
    in_order();
    for (std::int64_t row = 0; row < factors.rows; row += kTilePairs) {
      for (std::int64_t column = 0; column < factors.columns; column += 2 * kLanes) {
        multiply_tiles(factors, row, column);
      }
    }
    in_order();
  }
};

}  // namespace

const AttentionKernels kAttentionKernels = {kTileTokens, compute_piece<Tiles>, merge_parts<Tiles>};

}  // namespace amx
}  // namespace polychip

// Attention over a paged cache, in products of matrices: see `attention` in kernels/spec.py and
// kernels/paged_kv.py.
//
//   pairs of a query and head | tile 0: tokens     | tile 1 | ...    from position 0 of the request
//   piece 0   | group 0       |                    |        |        a piece packs a tile's keys and
//             | group 1       |                    |        |        values once; then for each group:
//   piece 1   | group 0       |                    |        |          scores = query . keys
//                                                                      weights = 2^(scores - greatest)
//                                                                      weighted = weights . values
//
// Each tile has a softmax of its own, and these are merged in order; what is masked adds exactly
// nothing. So a query's result is the same to the bit whether it is decoded alone, its tiles by several
// threads, or in a chunk, and however pieces and groups are cut.
//
// Rows that decode behind the same blocks are one piece over what they share, which packs it once for all
// of them; what each sees behind it goes on from there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "instructions.h"
#include "operation.h"
#include "packed_matrix.h"
#include "rows.h"
#include "shared_prefix.h"

namespace polychip {

constexpr std::int64_t kHeadSizeMax = 256;
// Columns, and the tokens of a tile that are computed, come in multiples of it, padded with zeros.
constexpr std::int64_t kTileStep = 32;
constexpr std::int64_t kTilePairs = 16;
// At most so many have their scores of a tile computed together.
constexpr std::int64_t kGroupPairs = 2 * kTilePairs;
constexpr std::int64_t kPiecePairsMax = 8 * kGroupPairs;
// What the outputs of a piece may be, so that they stay in a core's own cache.
constexpr std::int64_t kPieceNumbersMax = 16384;

constexpr std::int64_t rounded_up(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

// What is the same in all layers of a step. Arrays are the caller's; positions are those of requests.
struct AttentionStep {
  Number number;
  std::int64_t rows;
  const std::int64_t* query_starts;    // [rows + 1], in the step's tokens
  const std::int64_t* context_starts;  // [rows], position of the first query
  const std::int64_t* table_starts;    // [rows], position of the first token of the first block
  const std::int64_t* block_tables;    // [rows][table_width], physical
  std::int64_t table_width;
  std::int64_t blocks;  // that there are
  std::int64_t block_tokens;
  std::int64_t block_bytes;
  std::int64_t query_heads, kv_heads, head_size;
  const std::int64_t* q_to_kv;  // [query_heads]
  float scale;
  std::int64_t window;  // 0 for all
  float soft_cap;       // 0 for none
};

// One layer's: keys and values of physical block 0, [block_tokens][kv_heads][head_size].
struct AttentionLayer {
  const std::byte* keys;
  const std::byte* values;
  Rows query;   // [tokens][query_heads][head_size]
  Rows output;  // the same
};

// Some pairs of a query and a query head, all of a row and of one key/value head, over some of the tiles
// they see. With n query heads to the key/value head, pair p is query p / n and the head's number p % n.
struct AttentionPiece {
  std::int64_t row, kv_head;
  std::int64_t prefix;  // -1, or a shared one: query i is then that of its row i, and `row` is one of them
  std::int64_t first_pair, pairs;
  std::int64_t first_token, stop_token;  // positions; whole tiles, the last one cut
  std::int64_t partial;                  // where the softmaxes of its tiles go; -1: they are merged
};

// Pieces that may be computed at the same time.
struct AttentionPass {
  std::vector<AttentionPiece> pieces;
  // What is computed in several pieces of one group each, as if it were one.
  std::vector<AttentionPiece> merged;
};

class AttentionPlan {
 public:
  // tile_tokens: those of the kernels that will compute it.
  AttentionPlan(const AttentionStep& step, std::int64_t tile_tokens, int threads);

  // Whether all that will be read is in blocks that there are.
  bool within_blocks() const;
  const AttentionStep& step() const { return step_; }
  // Query heads of each key/value head.
  const std::vector<std::vector<std::int64_t>>& heads() const { return heads_; }
  // What rows share; it comes first.
  const AttentionPass& shared() const { return shared_; }
  const AttentionPass& own() const { return own_; }
  // Those that need not be read, because they were for another row.
  std::int64_t tokens_spared() const;
  // Where a query of a piece is among the step's tokens.
  std::int64_t token_of(const AttentionPiece& piece, std::int64_t query) const {
    return piece.prefix < 0 ? step_.query_starts[piece.row] + query
                            : step_.query_starts[row_of(piece, query)];
  }
  std::int64_t row_of(const AttentionPiece& piece, std::int64_t query) const {
    if (piece.prefix < 0) return piece.row;
    return prefixes_[static_cast<std::size_t>(piece.prefix)].rows[static_cast<std::size_t>(query)];
  }
  // Of a row's query head behind what the row shares: greatest score, sums of weights in parts
  // [kSumParts], weighted values [columns]. Null if it shares nothing.
  float* behind_prefix(std::int64_t row, std::int64_t head) const {
    const std::int64_t place = places_[static_cast<std::size_t>(row)];
    if (place < 0) return nullptr;
    return behind_.data() + (place * step_.query_heads + head) * (1 + kSumParts + columns());
  }
  // Of a tile: greatest scores [kGroupPairs], sums of weights in parts [pairs][kSumParts], weighted
  // values [pairs][columns].
  float* partial(const AttentionPiece& piece, std::int64_t tile) const {
    return partials_.data() + piece.partial + tile * partial_size(piece.pairs);
  }
  // Numbers of a head with their padding.
  std::int64_t columns() const { return rounded_up(step_.head_size, kTileStep); }

  static constexpr std::int64_t kSumParts = 16;

 private:
  std::int64_t partial_size(std::int64_t pairs) const {
    return kGroupPairs + pairs * (kSumParts + columns());
  }
  // All pairs of a row, or of a prefix's rows, and a key/value head.
  struct Work {
    std::int64_t row, kv_head, prefix;
    std::int64_t pairs, tokens;
  };
  std::int64_t tokens_seen(std::int64_t row) const;
  void cut(const std::vector<Work>& works, int threads, AttentionPass& pass);
  void add(const Work& work, std::int64_t cost, AttentionPass& pass);
  void add_parts(AttentionPiece piece, std::int64_t parts, AttentionPass& pass);
  AttentionPiece piece_of(const Work& work, std::int64_t first_pair, std::int64_t pairs) const;

  AttentionStep step_;
  std::int64_t tile_tokens_;
  std::vector<std::vector<std::int64_t>> heads_;
  std::vector<SharedPrefix> prefixes_;
  std::vector<std::int64_t> prefix_tokens_;  // [rows]; 0 of one that shares nothing
  std::vector<std::int64_t> places_;         // [rows], in what is behind prefixes; -1
  AttentionPass shared_, own_;
  mutable std::vector<float> partials_;
  mutable std::vector<float> behind_;
};

// Position of the first token that a row's query sees.
inline std::int64_t oldest_seen(const AttentionStep& step, std::int64_t row, std::int64_t query) {
  const std::int64_t start = step.table_starts[row];
  if (step.window == 0) return start;
  return std::max(start, step.context_starts[row] + query - step.window + 1);
}

// Memory of this thread's own, aligned to a cache line: kept until the thread ends or asks for more.
void* scratch_of_thread(std::size_t bytes);

struct AttentionKernels {
  // A multiple of kTileStep; whatever has one softmax.
  std::int64_t tile_tokens;
  void (*piece)(const AttentionPlan& plan, const AttentionPass& pass, const AttentionLayer& layer,
                std::int64_t index);
  void (*merge)(const AttentionPlan& plan, const AttentionPass& pass, const AttentionLayer& layer,
                std::int64_t index);
};

AttentionKernels attention_kernels(Instructions instructions, Number number);

namespace portable {
extern const AttentionKernels kAttentionKernels;
}
namespace avx2 {
extern const AttentionKernels kAttentionKernels;
}
namespace avx512 {
extern const AttentionKernels kAttentionKernels;
}
namespace amx {
extern const AttentionKernels kAttentionKernels;
}

class AttentionPieces final : public Operation {
 public:
  AttentionPieces(const AttentionPlan& plan, const AttentionPass& pass, const AttentionLayer& layer,
                  AttentionKernels kernels)
      : plan_(plan), pass_(pass), layer_(layer), kernels_(kernels) {}
  std::int32_t items() const override { return static_cast<std::int32_t>(pass_.pieces.size()); }
  void compute(std::int32_t item) const override { kernels_.piece(plan_, pass_, layer_, item); }

 private:
  const AttentionPlan& plan_;
  const AttentionPass& pass_;
  AttentionLayer layer_;
  AttentionKernels kernels_;
};

class AttentionMerge final : public Operation {
 public:
  AttentionMerge(const AttentionPlan& plan, const AttentionPass& pass, const AttentionLayer& layer,
                 AttentionKernels kernels)
      : plan_(plan), pass_(pass), layer_(layer), kernels_(kernels) {}
  std::int32_t items() const override { return static_cast<std::int32_t>(pass_.merged.size()); }
  void compute(std::int32_t item) const override { kernels_.merge(plan_, pass_, layer_, item); }

 private:
  const AttentionPlan& plan_;
  const AttentionPass& pass_;
  AttentionLayer layer_;
  AttentionKernels kernels_;
};

}  // namespace polychip

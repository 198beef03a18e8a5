// Attention over a paged cache: see `attention` in kernels/spec.py and kernels/paged_kv.py.
//
//   row's context   | part 0: 128 tokens | part 1 | ... | last part |
//
// Each query's softmax is computed part by part and the parts are merged in order. So the result is the
// same to the bit whether a token is decoded alone, its parts by several threads, or comes in a chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "instructions.h"
#include "operation.h"
#include "packed_matrix.h"
#include "rows.h"

namespace polychip {

constexpr std::int64_t kPartTokens = 128;
constexpr std::int64_t kHeadSizeMax = 256;

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

// Some queries of a row over some tokens of its context, for all heads.
struct AttentionPiece {
  std::int64_t row;
  std::int64_t first_query, queries;
  std::int64_t first_token, stop_token;  // positions; whole parts, the last one cut
  std::int64_t partial;                  // where its result goes; -1: it is the output
};

class AttentionPlan {
 public:
  AttentionPlan(const AttentionStep& step, int threads);

  // Whether all that will be read is in blocks that there are.
  bool within_blocks() const;
  const AttentionStep& step() const { return step_; }
  // Query heads of each key/value head.
  const std::vector<std::vector<std::int64_t>>& heads() const { return heads_; }
  const std::vector<AttentionPiece>& pieces() const { return pieces_; }
  // For each row whose context is computed in several pieces: its partial results, in order.
  struct Merged {
    std::int64_t token;
    std::int64_t first_partial, partials;
  };
  const std::vector<Merged>& merged() const { return merged_; }
  // Greatest score, sum of weights and weighted values of each head: [heads][2 + head_size].
  float* partial(std::int64_t index) const { return partials_.data() + index * partial_size(); }
  std::int64_t partial_size() const { return step_.query_heads * (2 + step_.head_size); }

 private:
  AttentionStep step_;
  std::vector<std::vector<std::int64_t>> heads_;
  std::vector<AttentionPiece> pieces_;
  std::vector<Merged> merged_;
  mutable std::vector<float> partials_;
};

// Position of the first token that a row's query sees.
inline std::int64_t oldest_seen(const AttentionStep& step, std::int64_t row, std::int64_t query) {
  const std::int64_t oldest = step.context_starts[row] + query - step.window + 1;
  return step.window > 0 && oldest > 0 ? oldest : 0;
}

struct AttentionKernels {
  void (*piece)(const AttentionPlan& plan, const AttentionLayer& layer, std::int64_t index);
  void (*merge)(const AttentionPlan& plan, const AttentionLayer& layer, std::int64_t index);
};

AttentionKernels attention_kernels(Instructions instructions);

namespace portable {
extern const AttentionKernels kAttentionKernels;
}
namespace avx2 {
extern const AttentionKernels kAttentionKernels;
}
namespace avx512 {
extern const AttentionKernels kAttentionKernels;
}

class AttentionPieces final : public Operation {
 public:
  AttentionPieces(const AttentionPlan& plan, const AttentionLayer& layer, AttentionKernels kernels)
      : plan_(plan), layer_(layer), kernels_(kernels) {}
  std::int32_t items() const override { return static_cast<std::int32_t>(plan_.pieces().size()); }
  void compute(std::int32_t item) const override { kernels_.piece(plan_, layer_, item); }

 private:
  const AttentionPlan& plan_;
  AttentionLayer layer_;
  AttentionKernels kernels_;
};

class AttentionMerge final : public Operation {
 public:
  AttentionMerge(const AttentionPlan& plan, const AttentionLayer& layer, AttentionKernels kernels)
      : plan_(plan), layer_(layer), kernels_(kernels) {}
  std::int32_t items() const override { return static_cast<std::int32_t>(plan_.merged().size()); }
  void compute(std::int32_t item) const override { kernels_.merge(plan_, layer_, item); }

 private:
  const AttentionPlan& plan_;
  AttentionLayer layer_;
  AttentionKernels kernels_;
};

}  // namespace polychip

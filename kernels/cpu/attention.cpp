#include "attention.h"

#include <algorithm>

namespace polychip {
namespace {

// Queries of one piece: with the query heads of a key/value head they fill the registers.
std::int64_t queries_of_piece(std::int64_t query_heads, std::int64_t kv_heads) {
  constexpr std::int64_t kPairs = 12;
  const std::int64_t heads = std::max<std::int64_t>(1, query_heads / std::max<std::int64_t>(1, kv_heads));
  return std::max<std::int64_t>(1, kPairs / heads);
}

}  // namespace

// A row of one query is cut along its context if rows alone do not keep the threads busy; any other
// is cut along its queries.
AttentionPlan::AttentionPlan(const AttentionStep& step, int threads) : step_(step) {
  heads_.resize(static_cast<std::size_t>(step.kv_heads));
  for (std::int64_t head = 0; head < step.query_heads; ++head) {
    heads_[static_cast<std::size_t>(step.q_to_kv[head])].push_back(head);
  }
  const std::int64_t queries_max = queries_of_piece(step.query_heads, step.kv_heads);
  std::int64_t partials = 0;
  for (std::int64_t row = 0; row < step.rows; ++row) {
    const std::int64_t count = step.query_starts[row + 1] - step.query_starts[row];
    const std::int64_t context = step.context_starts[row];
    // Parts begin at multiples of their size, wherever a window begins.
    const auto first_seen = [&](std::int64_t query) {
      return oldest_seen(step, row, query) / kPartTokens * kPartTokens;
    };
    if (count == 1) {
      const std::int64_t first = first_seen(0), stop = context + 1;
      const std::int64_t parts = (stop - first + kPartTokens - 1) / kPartTokens;
      const bool cut = parts > 1 && step.rows < threads;
      if (cut) {
        merged_.push_back({step.query_starts[row], partials, parts});
        for (std::int64_t part = 0; part < parts; ++part) {
          const std::int64_t from = first + part * kPartTokens;
          pieces_.push_back({row, 0, 1, from, std::min(from + kPartTokens, stop), partials++});
        }
        continue;
      }
    }
    for (std::int64_t query = 0; query < count; query += queries_max) {
      const std::int64_t queries = std::min(queries_max, count - query);
      pieces_.push_back({row, query, queries, first_seen(query), context + query + queries, -1});
    }
  }
  partials_.resize(static_cast<std::size_t>(partials * partial_size()));
}

bool AttentionPlan::within_blocks() const {
  for (const AttentionPiece& piece : pieces_) {
    const std::int64_t start = step_.table_starts[piece.row];
    const std::int64_t first =
        std::max({start, piece.first_token, oldest_seen(step_, piece.row, piece.first_query)});
    for (std::int64_t place = (first - start) / step_.block_tokens;
         place * step_.block_tokens < piece.stop_token - start; ++place) {
      if (place >= step_.table_width) return false;
      const std::int64_t block = step_.block_tables[piece.row * step_.table_width + place];
      if (block < 0 || block >= step_.blocks) return false;
    }
  }
  return true;
}

AttentionKernels attention_kernels(Instructions instructions) {
  switch (instructions) {
#if defined(__x86_64__)
    case Instructions::kAmx:
    case Instructions::kAvx512:
      return avx512::kAttentionKernels;
    case Instructions::kAvx2:
      return avx2::kAttentionKernels;
#endif
    default:
      return portable::kAttentionKernels;
  }
}

}  // namespace polychip

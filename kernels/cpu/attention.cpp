#include "attention.h"

#include <limits>
#include <memory>

namespace polychip {
namespace {

std::int64_t queries_of(const AttentionStep& step, std::int64_t row) {
  return step.query_starts[row + 1] - step.query_starts[row];
}

// In pairs times tokens: packing costs about as much as a group of pairs.
std::int64_t cost_of(std::int64_t pairs, std::int64_t tokens) {
  return rounded_up(pairs, kGroupPairs) * tokens;
}

std::int64_t cost_of(const AttentionPiece& piece) {
  return cost_of(piece.pairs, piece.stop_token - piece.first_token);
}

// The more pairs, the more often what is packed is used.
std::int64_t pairs_max(std::int64_t columns) {
  return std::min(kPieceNumbersMax / (columns * kGroupPairs) * kGroupPairs, kPiecePairsMax);
}

}  // namespace

AttentionPlan::AttentionPlan(const AttentionStep& step, std::int64_t tile_tokens, int threads)
    : step_(step),
      tile_tokens_(tile_tokens),
      heads_(static_cast<std::size_t>(step.kv_heads)),
      prefixes_(shared_prefixes(step, tile_tokens)),
      prefix_tokens_(static_cast<std::size_t>(step.rows), 0),
      places_(static_cast<std::size_t>(step.rows), -1) {
  for (std::int64_t head = 0; head < step.query_heads; ++head) {
    heads_[static_cast<std::size_t>(step.q_to_kv[head])].push_back(head);
  }
  std::vector<Work> shared, own;
  const auto add_work = [&](std::vector<Work>& works, std::int64_t row, std::int64_t prefix,
                            std::int64_t queries, std::int64_t tokens) {
    for (std::int64_t kv_head = 0; kv_head < step.kv_heads; ++kv_head) {
      const std::size_t heads = heads_[static_cast<std::size_t>(kv_head)].size();
      const auto pairs = queries * static_cast<std::int64_t>(heads);
      if (pairs > 0) works.push_back({row, kv_head, prefix, pairs, tokens});
    }
  };
  std::int64_t places = 0;
  for (std::size_t i = 0; i < prefixes_.size(); ++i) {
    const auto& [rows, tokens] = prefixes_[i];
    for (const std::int64_t row : rows) {
      prefix_tokens_[static_cast<std::size_t>(row)] = tokens;
      places_[static_cast<std::size_t>(row)] = places++;
    }
    const auto queries = static_cast<std::int64_t>(rows.size());
    add_work(shared, rows.front(), static_cast<std::int64_t>(i), queries, tokens);
  }
  behind_.resize(static_cast<std::size_t>(places * step.query_heads * (1 + kSumParts + columns())));
  for (std::int64_t row = 0; row < step.rows; ++row) {
    const std::int64_t queries = queries_of(step, row);
    if (queries > 0) add_work(own, row, -1, queries, tokens_seen(row));
  }
  cut(shared, threads, shared_);
  cut(own, threads, own_);
}

// By the query in the middle of a row, behind what the row shares.
std::int64_t AttentionPlan::tokens_seen(std::int64_t row) const {
  const std::int64_t query = queries_of(step_, row) / 2;
  const std::int64_t first =
      std::max(oldest_seen(step_, row, query), prefix_tokens_[static_cast<std::size_t>(row)]);
  return step_.context_starts[row] + query + 1 - first;
}

void AttentionPlan::cut(const std::vector<Work>& works, int threads, AttentionPass& pass) {
  std::int64_t cost = 0;
  for (const Work& work : works) cost += cost_of(work.pairs, work.tokens);
  // Several for each thread, so that none waits long for the last one.
  constexpr std::int64_t kPiecesOfThread = 3;
  if (threads > 1) cost /= kPiecesOfThread * threads;
  for (const Work& work : works) add(work, cost + 1, pass);
  // The last ones, for which threads help each other out, are to be the short ones.
  std::stable_sort(pass.pieces.begin(), pass.pieces.end(),
                   [](const AttentionPiece& a, const AttentionPiece& b) {
                     return cost_of(a) > cost_of(b);
                   });
}

// Pieces of about the cost given: equal parts of the pairs, and of what they see where those few pairs
// see much.
void AttentionPlan::add(const Work& work, std::int64_t cost, AttentionPass& pass) {
  const std::int64_t wanted = rounded_up(cost / work.tokens, kGroupPairs);
  const std::int64_t most = std::clamp(wanted, kGroupPairs, pairs_max(columns()));
  const std::int64_t count = (work.pairs + most - 1) / most;
  const std::int64_t each = rounded_up((work.pairs + count - 1) / count, kTilePairs);
  for (std::int64_t first = 0; first < work.pairs; first += each) {
    const AttentionPiece piece = piece_of(work, first, std::min(each, work.pairs - first));
    const std::int64_t parts = cost_of(piece) / cost;
    if (parts > 1 && piece.pairs <= kGroupPairs) {
      add_parts(piece, parts, pass);
    } else {
      pass.pieces.push_back(piece);
    }
  }
}

AttentionPiece AttentionPlan::piece_of(const Work& work, std::int64_t first_pair,
                                       std::int64_t pairs) const {
  AttentionPiece piece{};
  piece.row = work.row;
  piece.kv_head = work.kv_head;
  piece.prefix = work.prefix;
  piece.first_pair = first_pair;
  piece.pairs = pairs;
  piece.stop_token = work.tokens;
  piece.partial = -1;
  if (work.prefix >= 0) return piece;
  const auto heads = static_cast<std::int64_t>(heads_[static_cast<std::size_t>(work.kv_head)].size());
  const std::int64_t oldest = oldest_seen(step_, work.row, first_pair / heads);
  const std::int64_t behind = prefix_tokens_[static_cast<std::size_t>(work.row)];
  piece.first_token = std::max(oldest / tile_tokens_ * tile_tokens_, behind);
  piece.stop_token = step_.context_starts[work.row] + (first_pair + pairs - 1) / heads + 1;
  return piece;
}

void AttentionPlan::add_parts(AttentionPiece piece, std::int64_t parts, AttentionPass& pass) {
  const std::int64_t first = piece.first_token, stop = piece.stop_token;
  const std::int64_t tiles = rounded_up(stop - first, tile_tokens_) / tile_tokens_;
  parts = std::min(parts, tiles);
  piece.partial = static_cast<std::int64_t>(partials_.size());
  pass.merged.push_back(piece);
  partials_.resize(partials_.size() + static_cast<std::size_t>(tiles * partial_size(piece.pairs)));
  // Pairs that see nothing of a tile are not computed there: they have no greatest score.
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    std::fill_n(partial(piece, tile), kGroupPairs, -std::numeric_limits<float>::infinity());
  }
  for (std::int64_t part = 0; part < parts; ++part) {
    AttentionPiece some = piece;
    const std::int64_t tile = tiles * part / parts;
    some.first_token = first + tile * tile_tokens_;
    some.stop_token = std::min(stop, first + tiles * (part + 1) / parts * tile_tokens_);
    some.partial = piece.partial + tile * partial_size(piece.pairs);
    pass.pieces.push_back(some);
  }
}

std::int64_t AttentionPlan::tokens_spared() const {
  std::int64_t spared = 0;
  for (const SharedPrefix& prefix : prefixes_) {
    spared += (static_cast<std::int64_t>(prefix.rows.size()) - 1) * prefix.tokens;
  }
  return spared;
}

bool AttentionPlan::within_blocks() const {
  for (std::int64_t row = 0; row < step_.rows; ++row) {
    if (queries_of(step_, row) == 0) continue;
    const std::int64_t start = step_.table_starts[row];
    const std::int64_t first = oldest_seen(step_, row, 0) - start;
    const std::int64_t stop = step_.context_starts[row] + queries_of(step_, row) - start;
    for (std::int64_t place = first / step_.block_tokens; place * step_.block_tokens < stop; ++place) {
      if (place >= step_.table_width) return false;
      const std::int64_t block = step_.block_tables[row * step_.table_width + place];
      if (block < 0 || block >= step_.blocks) return false;
    }
  }
  return true;
}

void* scratch_of_thread(std::size_t bytes) {
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  thread_local std::unique_ptr<Line[]> lines;
  thread_local std::size_t count = 0;
  const std::size_t wanted = (bytes + sizeof(Line) - 1) / sizeof(Line);
  if (count < wanted) {
    lines.reset(new Line[wanted]);
    count = wanted;
  }
  return lines.get();
}

AttentionKernels attention_kernels(Instructions instructions, Number number) {
  switch (instructions) {
#if defined(__x86_64__)
    case Instructions::kAmx:
      // Tile registers do not multiply float32.
      return number == Number::kFloat32 ? avx512::kAttentionKernels : amx::kAttentionKernels;
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

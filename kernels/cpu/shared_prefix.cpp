#include "shared_prefix.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "attention.h"

namespace polychip {
namespace {

// Rows in the order of their tables, so that those with a common beginning are neighbours.
class Neighbours {
 public:
  Neighbours(const AttentionStep& step, std::int64_t tile_tokens)
      : step_(step), tile_tokens_(tile_tokens) {
    for (std::int64_t row = 0; row < step.rows; ++row) {
      const bool decodes = step.query_starts[row + 1] - step.query_starts[row] == 1;
      if (decodes && step.table_starts[row] == 0 && blocks_of(row) > 0) rows_.push_back(row);
    }
    std::sort(rows_.begin(), rows_.end(), [this](std::int64_t a, std::int64_t b) {
      return std::lexicographical_compare(table(a), table(a) + blocks_of(a), table(b),
                                          table(b) + blocks_of(b));
    });
    for (std::size_t i = 1; i < rows_.size(); ++i) {
      shared_.push_back(tokens_shared(rows_[i - 1], rows_[i]));
    }
  }

  std::vector<SharedPrefix> prefixes() const {
    return rows_.empty() ? std::vector<SharedPrefix>() : choose(0, rows_.size()).prefixes;
  }

 private:
  struct Choice {
    std::vector<SharedPrefix> prefixes;
    std::vector<std::int64_t> alone;  // rows that share nothing
  };

  const std::int64_t* table(std::int64_t row) const {
    return step_.block_tables + row * step_.table_width;
  }
  // Blocks that are full of what the row's query sees.
  std::int64_t blocks_of(std::int64_t row) const {
    return std::min(step_.context_starts[row] / step_.block_tokens, step_.table_width);
  }
  std::int64_t tokens_shared(std::int64_t a, std::int64_t b) const {
    const std::int64_t most = std::min(blocks_of(a), blocks_of(b));
    const std::int64_t blocks = std::mismatch(table(a), table(a) + most, table(b)).first - table(a);
    return blocks * step_.block_tokens / tile_tokens_ * tile_tokens_;
  }

  // Of the rows from `first` to before `stop`: what those share between which more is shared than
  // between all, and then what the others can.
  Choice choose(std::size_t first, std::size_t stop) const {
    if (stop - first == 1) return {{}, {rows_[first]}};
    const std::int64_t* shared = shared_.data();
    const std::int64_t least = *std::min_element(shared + first, shared + stop - 1);
    Choice choice;
    const auto add = [&](Choice part) {
      std::move(part.prefixes.begin(), part.prefixes.end(), std::back_inserter(choice.prefixes));
      choice.alone.insert(choice.alone.end(), part.alone.begin(), part.alone.end());
    };
    std::size_t begin = first;
    for (std::size_t i = first; i + 1 < stop; ++i) {
      if (shared[i] != least) continue;
      add(choose(begin, i + 1));
      begin = i + 1;
    }
    add(choose(begin, stop));
    join(choice, least);
    return choice;
  }

  // Lets those rows share the first `tokens` that are alone, and those that save less by what they share.
  static void join(Choice& choice, std::int64_t tokens) {
    const auto saved = [](const SharedPrefix& prefix, std::int64_t count) {
      return count * (static_cast<std::int64_t>(prefix.rows.size()) - 1);
    };
    const auto joins = [&](const SharedPrefix& prefix) {
      return saved(prefix, tokens) + tokens > saved(prefix, prefix.tokens);
    };
    SharedPrefix all{choice.alone, tokens};
    std::int64_t lost = 0;
    std::vector<SharedPrefix> others;
    for (const SharedPrefix& prefix : choice.prefixes) {
      if (joins(prefix)) {
        all.rows.insert(all.rows.end(), prefix.rows.begin(), prefix.rows.end());
        lost += saved(prefix, prefix.tokens);
      } else {
        others.push_back(prefix);
      }
    }
    if (all.rows.empty() || saved(all, tokens) <= lost) return;
    others.push_back(std::move(all));
    choice = {std::move(others), {}};
  }

  const AttentionStep& step_;
  const std::int64_t tile_tokens_;
  std::vector<std::int64_t> rows_;
  std::vector<std::int64_t> shared_;  // of each with the next one: tokens
};

}  // namespace

std::vector<SharedPrefix> shared_prefixes(const AttentionStep& step, std::int64_t tile_tokens) {
  if (step.window != 0) return {};
  return Neighbours(step, tile_tokens).prefixes();
}

}  // namespace polychip

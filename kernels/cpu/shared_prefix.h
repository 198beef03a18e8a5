// Which rows of a step decode behind the same blocks: what they have in common is read once for all.
#pragma once

#include <cstdint>
#include <vector>

namespace polychip {

struct AttentionStep;

// Rows of one query each that see all of the first `tokens` positions, in the same blocks.
struct SharedPrefix {
  std::vector<std::int64_t> rows;  // at least two
  std::int64_t tokens;             // whole tiles
};

// No row is in two of them; a row that shares much with few and little with many is where more is saved.
// None where a window hides what lies behind it.
std::vector<SharedPrefix> shared_prefixes(const AttentionStep& step, std::int64_t tile_tokens);

}  // namespace polychip

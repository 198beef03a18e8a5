"""What a request's block tables cost over the KV groups of its model, and how far back they reach.

A group of layers that see every token needs a block for every block of tokens. Behind a window
nothing is read any more, so that a table with one loses its front as rows are planned:

    [ dropped ... | slack | window ..... | row ... chunk at most ]
                  first_kept             position
                          first_needed
    |-------------------- held_max blocks at most ---------------|
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

SLACK_BLOCKS = 2
"""Kept behind the window, so that a request that ends is found again at its last full block: rows
were planned beyond it, and a full hit gives up one block more."""


@dataclass(frozen=True)
class KVGroups:
    """Plain arithmetic on tokens and blocks.

    windows: of every KV group the tokens its layers see, the present one included; 0 is all.
    block_tokens: tokens of a block. chunk_tokens: most tokens of a row.
    """

    windows: tuple[int, ...]
    block_tokens: int
    chunk_tokens: int

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """The groups without a window."""
        return tuple(group for group, window in enumerate(self.windows) if not window)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """The groups with one."""
        return tuple(group for group, window in enumerate(self.windows) if window)

    def blocks_for(self, tokens_count: int) -> int:
        """How many blocks so many tokens fill, the last one maybe in part."""
        return -(-tokens_count // self.block_tokens)

    def first_needed(self, group: int, position: int) -> int:
        """The first block that a row from `position` on reads; a prefix of so many tokens is of
        use if its blocks are resident from there on."""
        window = self.windows[group]
        return max(0, position - window + 1) // self.block_tokens if window else 0

    def first_kept(self, group: int, position: int) -> int:
        """The first block that a table keeps when a row from `position` on is planned."""
        return max(0, self.first_needed(group, position) - SLACK_BLOCKS)

    def held_max(self, group: int) -> int:
        """Most blocks a table with a window holds: any row's window and chunk, and the slack."""
        tokens_count = self.windows[group] - 1 + self.chunk_tokens
        return (tokens_count + self.block_tokens - 2) // self.block_tokens + 1 + SLACK_BLOCKS

    def cost(self, tokens_count: int, resident_count: int = 0) -> int:
        """Blocks that a request takes in all groups to compute so many tokens, its first
        `resident_count` blocks being resident: of these, what its windows need counts, too."""
        count = self.blocks_for(tokens_count)
        total = len(self.whole) * (count - resident_count)
        for group in self.windowed:
            first = self.first_needed(group, resident_count * self.block_tokens)
            total += min(count - first, self.held_max(group))
        return total

    def tokens_max(self, blocks_count: int, context_tokens: int) -> int:
        """Most tokens, up to `context_tokens`, that a request can have in so many blocks."""
        rows = range(self.blocks_for(context_tokens) + 1)
        size = self.block_tokens
        fitting = bisect_right(rows, blocks_count, key=lambda row: self.cost(row * size)) - 1
        return min(fitting * size, context_tokens)

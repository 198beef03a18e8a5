"""What each group has to do: counted when a request is dispatched, released when it leaves."""

from dataclasses import dataclass

from control_plane.scheduling.group_speed import GroupSpeed
from control_plane.scheduling.kv_groups import KVGroups

ANSWER_TOKENS = 32
"""Output tokens that a request counts for from its dispatch to its end, if it may have so many; how
many it will have nobody knows. A row that decodes computes as much as a prompt's token."""


def answer_tokens(tokens_left: int) -> int:
    """What the rest of an answer counts as, given how many tokens it may yet have."""
    return min(ANSWER_TOKENS, tokens_left)


@dataclass(slots=True)
class GroupLoad:
    """One group's line. Tokens are uncached ones still to be prefilled, queued or running.

    tokens_max: most tokens of one request that its memory and its chips' context hold.
    answer_tokens: what its requests' answers count as. queued_blocks: blocks the waiting requests
    will take. request_s: how long a request keeps its slot, lately. last_dispatch: number of the
    last dispatch that went here. available_blocks and running_count are what its scheduler last
    published.
    """

    group_id: str
    kv: KVGroups
    total_blocks: int
    tokens_max: int
    slots_count: int
    speed: GroupSpeed
    requests_count: int = 0
    queued_tokens: int = 0
    answer_tokens: int = 0
    queued_blocks: int = 0
    available_blocks: int = 0
    running_count: int = 0
    last_dispatch: int = 0
    request_s: float = 1.0


@dataclass(slots=True)
class Dispatched:
    """What one request was counted as."""

    group: GroupLoad
    tokens: int
    answer_tokens: int
    blocks: int


class ChipLoadTable:
    """Every group's load and every dispatched request's part of it."""

    def __init__(self) -> None:
        self.groups: dict[str, GroupLoad] = {}
        self._dispatched: dict[str, Dispatched] = {}
        self._dispatches = 0

    def __len__(self) -> int:
        return len(self._dispatched)

    def add_group(self, load: GroupLoad) -> None:
        """A group serves."""
        self.groups[load.group_id] = load

    def drop_group(self, group_id: str) -> None:
        """A group serves no more; its requests release their load one by one."""
        del self.groups[group_id]

    def dispatch(
        self, request_id: str, group_id: str, tokens: int, tokens_left: int, blocks: int
    ) -> None:
        """Counts a request that begins to wait in a group; it may have `tokens_left` more."""
        assert request_id not in self._dispatched, request_id
        group = self.groups[group_id]
        counted = Dispatched(group, tokens, answer_tokens(tokens_left), blocks)
        self._dispatched[request_id] = counted
        self._dispatches += 1
        group.last_dispatch = self._dispatches
        group.requests_count += 1
        group.queued_tokens += tokens
        group.answer_tokens += counted.answer_tokens
        group.queued_blocks += blocks

    def admit(self, request_id: str, tokens: int) -> None:
        """It entered a slot: its blocks are the ledger's now, its prefill is known exactly."""
        counted = self._dispatched[request_id]
        counted.group.queued_blocks -= counted.blocks
        counted.group.queued_tokens += tokens - counted.tokens
        counted.blocks, counted.tokens = 0, tokens

    def progress(self, request_id: str, tokens: int) -> None:
        """Some of its prefill is done."""
        counted = self._dispatched[request_id]
        counted.group.queued_tokens -= tokens
        counted.tokens -= tokens

    def release(self, request_id: str) -> None:
        """It left the group, one way or another; harmless if it was not counted."""
        counted = self._dispatched.pop(request_id, None)
        if counted:
            counted.group.requests_count -= 1
            counted.group.queued_tokens -= counted.tokens
            counted.group.answer_tokens -= counted.answer_tokens
            counted.group.queued_blocks -= counted.blocks

    def check_integrity(self) -> None:
        """Asserts that every group's load is the sum of its requests'."""
        for group in self.groups.values():
            mine = [d for d in self._dispatched.values() if d.group is group]
            assert group.requests_count == len(mine), group
            assert group.queued_tokens == sum(d.tokens for d in mine), group
            assert group.answer_tokens == sum(d.answer_tokens for d in mine), group
            assert group.queued_blocks == sum(d.blocks for d in mine), group

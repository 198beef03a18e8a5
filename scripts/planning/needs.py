"""What a model takes of the chips, and what the chips have: plain records, no torch.

Task --measuring, a process of its own--> ModelNeeds, Chips --> capacity, speed --> advice
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from control_plane.config import KV_POLICIES


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be measured: a model and how it is held, chips and how they are opened.

    options: of the backend. sizes: of groups, under every KV policy; larger_sizes: of groups of
    which only the default policy is of interest.
    """

    model: str
    weights: str
    dtype: str
    backend: str
    devices: tuple[str, ...]
    chips_on_host: int
    block_tokens: int
    sizes: tuple[int, ...]
    larger_sizes: tuple[int, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """What one rank of a group holds; query_heads and kv_heads are those it computes and keeps.

    block_bytes: of a KV block, with the backend's padding.
    """

    weight_bytes: int
    block_bytes: int
    query_heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class GroupNeeds:
    """The ranks of a group; policies: the KV policies under which they hold exactly this."""

    policies: tuple[str, ...]
    ranks: tuple[RankNeeds, ...]

    @property
    def size(self) -> int:
        """Chips of the group."""
        return len(self.ranks)

    @property
    def weight_bytes(self) -> int:
        """Of the rank that holds the most."""
        return max(rank.weight_bytes for rank in self.ranks)

    @property
    def block_bytes(self) -> int:
        """Of the rank whose blocks are the largest."""
        return max(rank.block_bytes for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """A model as the chips would hold it.

    dtype: computed in, such as "bfloat16". weights: as --weights says. digest: as the worker tells
    the control plane. kv_windows: of each KV group the tokens its layers see, 0 for all. groups: by
    size, then by policy; refused: why other sizes cannot be.
    """

    architecture: str
    digest: str
    dtype: str
    weights: str
    context_tokens: int
    kv_windows: tuple[int, ...]
    groups: tuple[GroupNeeds, ...]
    refused: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Of the whole model on one chip: P of the rule."""
        return next(group.weight_bytes for group in self.groups if group.size == 1)

    def of_size(self, size: int) -> tuple[GroupNeeds, ...]:
        """The needs of groups of that size, one for each different outcome of a KV policy."""
        return tuple(group for group in self.groups if group.size == size)


@dataclass(frozen=True, slots=True)
class Chips:
    """The chips to plan for.

    backend: as --backend names it. at_hand: they are this machine's; else only their memory is
    known. free_bytes: of each chip before the model is loaded; of all together where they share it,
    with one worker's process there. process_bytes: what each further one takes. description: of the
    first chip.
    """

    backend: str
    count: int
    at_hand: bool
    free_bytes: int
    shared: bool
    description: str
    process_bytes: int = 0

    @property
    def bytes_each(self) -> int:
        """What each has for a model and its KV: M of the rule."""
        if not self.shared:
            return self.free_bytes
        return max(0, self.free_bytes - (self.count - 1) * self.process_bytes) // self.count


def merged(outcomes: Iterable[GroupNeeds]) -> tuple[GroupNeeds, ...]:
    """The outcomes of single policies of one group size, those that are alike as one."""
    policies: dict[tuple[RankNeeds, ...], tuple[str, ...]] = {}
    for outcome in outcomes:
        policies[outcome.ranks] = policies.get(outcome.ranks, ()) + outcome.policies
    ordered = ((sorted(names, key=KV_POLICIES.index), ranks) for ranks, names in policies.items())
    return tuple(GroupNeeds(tuple(names), ranks) for names, ranks in ordered)

"""Which layers of a model share block tables: the KV groups.

    layers    0   1   2   3   4   5   6   7        windows w, w, 0, w, w, w, 0, w
    groups   [2, 6]  window 0     [0, 1]  w     [3, 4]  w     [5, 7]  w

Layers that see every token and layers with a window need different blocks: behind a window none.
All groups have as many layers, so that all blocks are alike and one pool serves them all; the last
group of a window may lack some, whose part of its blocks is never used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from chip_worker.errors import ModelError
from chip_worker.model_config import ModelConfig

KV_GROUPS_MAX = 256
"""As the control plane accepts: each costs a block table for every request."""


@dataclass(frozen=True)
class KVPlace:
    """Where a layer's keys and values are: its KV group, and its number among the group's."""

    group: int
    layer: int


@dataclass(frozen=True)
class KVGroups:
    """windows: of each group, 0 for none. places: of each layer. layers: of every group."""

    windows: tuple[int, ...]
    places: tuple[KVPlace, ...]
    layers: int


def model_kv_groups(config: ModelConfig) -> KVGroups:
    """The KV groups of a model. Raises ModelError for more than KV_GROUPS_MAX."""
    return group_layers(config.layer_windows or (0,) * config.layers_count)


def group_layers(layer_windows: Sequence[int]) -> KVGroups:
    """The groups of layers with these windows (0: none); those without one come first.

    Raises ModelError for more than KV_GROUPS_MAX.
    """
    by_window: dict[int, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        by_window.setdefault(window, []).append(layer)
    size = min(map(len, by_window.values()))
    windows: list[int] = []
    places: dict[int, KVPlace] = {}
    for window in sorted(by_window):
        members = by_window[window]
        for start in range(0, len(members), size):
            for number, layer in enumerate(members[start : start + size]):
                places[layer] = KVPlace(len(windows), number)
            windows.append(window)
    if len(windows) > KV_GROUPS_MAX:
        raise ModelError(
            f"layer_windows: the windows of {len(layer_windows)} layers, {size} of them at the "
            f"rarest, make {len(windows)} KV groups; at most {KV_GROUPS_MAX} can be served"
        )
    ordered = tuple(places[layer] for layer in range(len(layer_windows)))
    return KVGroups(tuple(windows), ordered, size)

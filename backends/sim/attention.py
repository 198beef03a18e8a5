"""Attention over the paged cache: what a step needs made once, then a few launches a layer.

rows      [decode decode decode][prompt][prompt][decode ...]    runs of one kind, in order
launches  [ <= limit ][ <= limit]  ...                          a kernel takes so many rows
heads     0 0 0 0 1 .  ->  0 0 0 0 | 1 . . .                    as many a key head everywhere
"""

import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

import torch

from backends.sim.arithmetic import Scores
from backends.sim.device import SimDevice
from backends.sim.driver import RowLengths
from backends.sim.launcher import pieces
from backends.sim.open_devices import OpenDevices
from kernels.paged_kv import PagedKV


@dataclass(frozen=True, eq=False)
class RowRun:
    """Rows next to each other that one launch takes; tokens: theirs, in the step.

    decodes: one query a row. tables [rows, blocks]: on the chip, as wide as the kernel wants.
    """

    tokens: slice
    decodes: bool
    tables: torch.Tensor
    lengths: RowLengths


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What all layers of a step share: the runs, and where its tokens are to be written."""

    runs: tuple[RowRun, ...]
    blocks: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class UniformHeads:
    """Query heads put in order of key heads, as many each; the kernel knows no other sharing.

    filled[i]: which query head stands at place i, -1 for none. places[h]: where query head h is.
    """

    filled: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def is_identity(self) -> bool:
        """Whether the heads are uniform as they are."""
        return self.filled == self.places == tuple(range(len(self.filled)))


@lru_cache(maxsize=64)
def uniform_heads(q_to_kv: tuple[int, ...], kv_heads: int) -> UniformHeads:
    """Every key head gets as many places as the one with the most query heads has."""
    members: list[list[int]] = [[] for _ in range(kv_heads)]
    for query_head, kv_head in enumerate(q_to_kv):
        members[kv_head].append(query_head)
    most = max(map(len, members))
    filled = tuple(head for heads in members for head in (*heads, *[-1] * (most - len(heads))))
    return UniformHeads(filled, tuple(filled.index(head) for head in range(len(q_to_kv))))


class SimAttention:
    """Each public method is the operation of its name in `kernels.spec`."""

    def __init__(self, devices: OpenDevices) -> None:
        self._devices = devices

    def write_kv(self, cache: PagedKV, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keys and values of a step's tokens into the layer's blocks."""
        device = self._devices.holding(cache.keys[layer])
        inputs = _inputs(cache, device)
        device.driver.reshape_and_cache(
            device.contiguous(key),
            device.contiguous(value),
            cache.keys[layer],
            cache.values[layer],
            inputs.blocks,
            inputs.places,
        )

    def attention(
        self,
        cache: PagedKV,
        layer: int,
        query: torch.Tensor,
        q_to_kv: tuple[int, ...],
        scale: float,
        window: int,
        soft_cap: float,
    ) -> torch.Tensor:
        """Causal attention of every row over its own blocks."""
        device = self._devices.holding(cache.keys[layer])
        heads = uniform_heads(q_to_kv, cache.keys[layer].shape[2])
        query, rule = device.contiguous(query), Scores(scale, window, soft_cap)
        if heads.is_identity:
            return self._attend(device, cache, layer, query, rule)
        tokens, _, size = query.shape
        padded = device.allocate((tokens, len(heads.filled), size), query.dtype)
        device.driver.take_heads(query, heads.filled, padded)
        attended = self._attend(device, cache, layer, padded, rule)
        output = device.allocate(query.shape, query.dtype)
        device.driver.take_heads(attended, heads.places, output)
        return output

    def _attend(
        self, device: SimDevice, cache: PagedKV, layer: int, query: torch.Tensor, rule: Scores
    ) -> torch.Tensor:
        output = device.allocate(query.shape, query.dtype)
        for run in _inputs(cache, device).runs:
            caches = cache.keys[layer], cache.values[layer]
            own, result = query[run.tokens], output[run.tokens]
            if run.decodes:
                device.driver.speculative_attention(
                    own,
                    *caches,
                    run.tables,
                    run.lengths,
                    rule.scale,
                    result,
                    max_window_size=rule.window or -1,
                    logits_soft_cap=rule.soft_cap,
                )
            else:
                alpha = rule.scale * math.sqrt(query.shape[-1])
                device.driver.prefill_attention(
                    own,
                    *caches,
                    run.tables,
                    run.lengths,
                    alpha,
                    result,
                    swa_left=rule.window - 1,
                    logits_soft_cap=rule.soft_cap,
                )
        return output


def _inputs(cache: PagedKV, device: SimDevice) -> StepInputs:
    """Made in the first layer, kept with the step."""
    found: StepInputs | None = cache.step_cache.get(_INPUTS)
    if found is None:
        found = cache.step_cache[_INPUTS] = StepInputs(
            runs=tuple(_runs(cache, device)),
            blocks=device.indices(cache.token_blocks),
            places=device.indices(cache.token_places),
        )
    return found


_INPUTS = "sim-inputs"


def _runs(cache: PagedKV, device: SimDevice) -> list[RowRun]:
    starts = cache.query_starts
    # The kernels count from the first token of the first block. It may be a later one of the
    # request: scores depend on no position, only what is hidden does, by differences.
    contexts = tuple(map(operator.sub, cache.context_starts, cache.table_starts))
    tables = device.indices(cache.block_tables)
    pairs = list(zip(starts[:-1], contexts, strict=True))
    on_chip = device.to_chip(torch.tensor(pairs, dtype=torch.int32).view(-1, 2))
    runs = []
    kinds = [stop - start == 1 for start, stop in pairwise(starts)]
    first = 0
    for decodes, members in groupby(kinds):
        count = len(list(members))
        for piece in pieces(count, device.driver.decode_rows_max if decodes else None):
            rows = slice(first + piece.start, first + piece.stop)
            lengths = RowLengths(starts[rows.start : rows.stop + 1], contexts[rows], on_chip[rows])
            tokens = slice(starts[rows.start], starts[rows.stop])
            runs.append(RowRun(tokens, decodes, tables[rows], lengths))
        first += count
    return runs

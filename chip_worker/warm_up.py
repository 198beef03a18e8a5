"""What a rank does once before it is ready: it times a prefill and a decode step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import torch

from backends.interface import BatchRows, Communicator, MemoryPool
from chip_worker.batch import FormGroup, RowWants, SlotSampling
from chip_worker.model_runner import ModelRunner
from chip_worker.sampler import Sampler
from chip_worker.slots import Slot
from chip_worker.step_batch import StepBatch
from chip_worker.step_memory import StepMemory

TOKENS_MAX = 128
"""Enough to measure the rate of a prefill; a longer one would only make the start longer."""


@dataclass(frozen=True)
class WarmUp:
    """What the warm-up measured."""

    prefill_tokens_per_s: float
    decode_step_s: float


def warm_up(
    form: FormGroup,
    runner: ModelRunner,
    sampler: Sampler,
    memory: StepMemory,
    pool: MemoryPool,
    pool_blocks: int,
    kv_groups_count: int,
) -> WarmUp:
    """Times both on blocks of `pool`, the runner's, that are idle again afterwards.

    The same work on every rank: `pool_blocks` is what the smallest pool of the group holds.
    """
    held_tokens = pool_blocks * form.block_tokens
    longest = min(form.chunk_tokens, form.context_tokens - 1, held_tokens - 1)
    tokens = max(1, min(longest, TOKENS_MAX))
    decodes = tokens + 1 <= min(held_tokens, form.context_tokens)
    blocks = pool.allocate(-(-(tokens + decodes) // form.block_tokens))

    def timed(start: int, count: int) -> int:
        batch = _scratch_batch(start, count, form.block_tokens, blocks, kv_groups_count)
        return _time_ns(lambda: _compute(batch, runner, sampler), memory)

    try:
        decode_ns = prefill_ns = timed(0, tokens)
        if decodes:
            # The first decode step pays for what is set up on demand.
            timed(tokens, 1)
            decode_ns = timed(tokens, 1)
    finally:
        pool.release(blocks)
    return WarmUp(tokens / (prefill_ns / 1e9), decode_ns / 1e9)


def smallest_pool(communicator: Communicator, memory: StepMemory, own_blocks: int) -> int:
    """Blocks of the group's smallest pool; every rank must call it."""
    if communicator.world_size == 1:
        return own_blocks
    own = memory.place("warm_up", torch.tensor([own_blocks], dtype=torch.int64))
    every = memory.buffer("warm_up", (communicator.world_size, 1), torch.int64)
    communicator.all_gather(own, every).wait_stream()
    return int(memory.device.to_host(every).min())


def _time_ns(compute: Callable[[], None], memory: StepMemory) -> int:
    started_ns = perf_counter_ns()
    compute()
    memory.device.synchronize()
    elapsed_ns = perf_counter_ns() - started_ns
    memory.end()
    return elapsed_ns


def _compute(batch: StepBatch, runner: ModelRunner, sampler: Sampler) -> None:
    logits = runner.logits(runner.forward(batch), batch.sampled_tokens)
    sampler.draw(logits, [_scratch_slot()])


def _scratch_batch(
    start: int, tokens: int, block_tokens: int, blocks: Sequence[int], kv_groups_count: int
) -> StepBatch:
    """All KV groups take the same blocks, though they overwrite each other's: nobody reads on."""
    stop = start + tokens
    rows = BatchRows((0, tokens), (start,), (blocks[: -(-stop // block_tokens)],))
    return StepBatch(
        ids=np.zeros(tokens, dtype=np.int64),
        positions=np.arange(start, stop, dtype=np.int64),
        rows=(rows,) * kv_groups_count,
        sampled_tokens=(tokens - 1,),
    )


def _scratch_slot() -> Slot:
    return Slot(
        tokens=np.zeros(1, dtype=np.int64),
        known=0,
        output_start=0,
        length=0,
        tables=[],
        sampling=SlotSampling(temperature=1.0, seed=0),
        wants=RowWants(),
    )

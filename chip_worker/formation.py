"""All that lives for one epoch on one rank: KV pool, slot tables, bound model, sampler."""

from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
import torch

from backends.interface import (
    BackendRuntime,
    BatchRows,
    Communicator,
    Device,
    KernelTable,
    KVSpec,
    MemoryPool,
)
from chip_worker.batch import FormGroup, PromptScores, RowResult, RowWants, SlotSampling, Step
from chip_worker.config import WorkerConfig
from chip_worker.memory_pool import KVDemand, open_memory_pool
from chip_worker.model_runner import ModelRunner, StepBatch, build_batch
from chip_worker.models.model import ModelPlace
from chip_worker.prompt_scorer import PromptScorer
from chip_worker.sampler import Sampler, sampler_requirements
from chip_worker.shard_loader import LoadedShard
from chip_worker.slots import Slot, SlotTables
from chip_worker.timed_communicator import TimedCommunicator
from chip_worker.token_scores import TokenScorer

WARM_UP_TOKENS_MAX = 128
"""Enough to measure the rate of a prefill; a longer one would only make the start longer."""


@dataclass(frozen=True)
class WarmUp:
    """What the warm-up measured."""

    prefill_tokens_per_s: float
    decode_step_s: float


@dataclass(frozen=True)
class StepOutcome:
    """What a step returns on rank 0, as in `batch.StepResult`; empty on the other ranks."""

    rows: tuple[RowResult, ...] = ()
    prompt_scores: tuple[PromptScores, ...] = ()


class Formation:
    """A rank ready to take the steps of one epoch. Owns the communicator; `close` ends it."""

    def __init__(
        self,
        form: FormGroup,
        config: WorkerConfig,
        runtime: BackendRuntime,
        device: Device,
        loaded: LoadedShard,
        communicator: Communicator,
    ) -> None:
        """Raises OutOfMemory, UnsupportedOperation or ModelError; the communicator is then open."""
        self.form = form
        # A rank alone waits for nobody, and a decode step makes some sixty calls.
        self._communicator = (
            TimedCommunicator(communicator) if form.world_size > 1 else communicator
        )
        self._device = device
        spec = KVSpec(
            layers=loaded.config.layers_count,
            kv_heads=len(loaded.shard.kv_heads),
            head_size=loaded.config.head_size,
            block_tokens=form.block_tokens,
            dtype=loaded.dtype,
        )
        demand = KVDemand(form.slots, form.context_tokens)
        self._pool = open_memory_pool(config, runtime, device, spec, demand)
        row_tokens_max = form.chunk_tokens + form.slots
        kernels = _bind_kernels(runtime, loaded, self._pool, row_tokens_max)
        place = ModelPlace(device, kernels, self._communicator, loaded.shard, form.context_tokens)
        model = loaded.model(loaded.config, loaded.weights, place)
        self._runner = ModelRunner(model, self._pool, device, form.vocabulary_tokens or None)
        self._tables = SlotTables(
            slots_count=form.slots,
            context_tokens=form.context_tokens,
            block_tokens=form.block_tokens,
            blocks_count=self._pool.capacity,
            row_tokens_max=row_tokens_max,
        )
        scorer = TokenScorer(kernels, device)
        self._sampler = Sampler(kernels, self._communicator, device, self._tables, scorer)
        self._prompt_scorer = PromptScorer(self._runner, scorer)

    @property
    def blocks(self) -> int:
        """Capacity of this chip's KV pool."""
        return self._pool.capacity

    @property
    def waited_ns(self) -> int:
        """Time spent in the communicator since the epoch began."""
        communicator = self._communicator
        return communicator.waited_ns if isinstance(communicator, TimedCommunicator) else 0

    def occupied_slots(self) -> list[int]:
        """Slots that hold a request."""
        return self._tables.occupied()

    def run(self, step: Step) -> StepOutcome:
        """Applies and computes a step.

        Raises DivergedError before anything is computed if the step does not fit the tables.
        """
        rows = self._tables.apply(step)
        if not rows:
            return StepOutcome()
        with torch.no_grad():
            batch = build_batch(rows)
            hidden = self._runner.forward(batch)
            logits = self._runner.logits(hidden, batch.sampled_tokens)
            results = self._sampler.sample(logits, [row.slot for row in rows if row.sampled])
            return StepOutcome(results, self._prompt_scorer.score(hidden, rows))

    def warm_up(self) -> WarmUp:
        """Times a prefill and a decode step, on blocks no request uses yet.

        The same work on every rank: the ranks agree on the smallest pool first.
        """
        form = self.form
        with torch.no_grad():
            held_tokens = self._smallest_pool() * form.block_tokens
            longest = min(form.chunk_tokens, form.context_tokens - 1, held_tokens - 1)
            tokens = max(1, min(longest, WARM_UP_TOKENS_MAX))
            prefill_ns = self._time_scratch_step(0, tokens)
            if tokens + 1 > min(held_tokens, form.context_tokens):
                return WarmUp(tokens / (prefill_ns / 1e9), prefill_ns / 1e9)
            # The first decode step pays for what is set up on demand.
            self._time_scratch_step(tokens, 1)
            decode_ns = self._time_scratch_step(tokens, 1)
        return WarmUp(tokens / (prefill_ns / 1e9), decode_ns / 1e9)

    def abort(self) -> None:
        """Makes a pending collective fail soon; from any thread."""
        self._communicator.abort()

    def close(self) -> None:
        """Gives back pool and communicator; waits for nobody."""
        self._communicator.close()
        self._pool.close()

    def _smallest_pool(self) -> int:
        own = self._device.to_chip(torch.tensor([self._pool.capacity], dtype=torch.int64))
        every = self._device.allocate((self._communicator.world_size, 1), torch.int64)
        self._communicator.all_gather(own, every).wait_stream()
        return int(self._device.to_host(every).min())

    def _time_scratch_step(self, start: int, tokens_count: int) -> int:
        stop = start + tokens_count
        blocks = list(range(-(-stop // self.form.block_tokens)))
        batch = StepBatch(
            ids=np.zeros(tokens_count, dtype=np.int64),
            positions=np.arange(start, stop, dtype=np.int64),
            rows=BatchRows((0, tokens_count), (start,), (blocks,)),
            sampled_tokens=(tokens_count - 1,),
        )
        started_ns = perf_counter_ns()
        logits = self._runner.logits(self._runner.forward(batch), batch.sampled_tokens)
        self._sampler.draw(logits, [_scratch_slot()])
        self._device.synchronize()
        return perf_counter_ns() - started_ns


def _bind_kernels(
    runtime: BackendRuntime, loaded: LoadedShard, pool: MemoryPool, rows_max: int
) -> KernelTable:
    requirements = loaded.model.requirements(
        loaded.config, loaded.shard, loaded.dtype_name, pool.layout.order, rows_max
    )
    return runtime.bind_kernels({**requirements, **sampler_requirements(rows_max)})


def _scratch_slot() -> Slot:
    return Slot(
        tokens=np.zeros(1, dtype=np.int64),
        known=0,
        output_start=0,
        length=0,
        block_ids=[],
        sampling=SlotSampling(temperature=1.0, seed=0),
        wants=RowWants(),
    )

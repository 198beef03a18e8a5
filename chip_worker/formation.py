"""All that lives for one epoch on one rank: KV pool, slot tables, bound model, sampler."""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog
import torch

from backends.errors import BackendError
from backends.fusion import compose
from backends.interface import (
    BackendRuntime,
    Communicator,
    Device,
    KernelTable,
    Lifetime,
    MemoryPool,
)
from chip_worker.batch import FormGroup, PromptScores, RowResult, Step
from chip_worker.config import WorkerConfig
from chip_worker.memory_pool import open_memory_pool
from chip_worker.memory_watch import MemoryWatch
from chip_worker.model_runner import ModelRunner
from chip_worker.models.model import ModelPlace
from chip_worker.numeric_probe import probe_numerics
from chip_worker.prompt_scorer import PromptScorer
from chip_worker.sampler import Sampler, sampler_requirements
from chip_worker.shard_loader import LoadedShard, kv_spec
from chip_worker.slots import PlannedRow, SlotTables
from chip_worker.step_batch import build_batch
from chip_worker.step_memory import StepMemory
from chip_worker.timed_communicator import TimedCommunicator
from chip_worker.token_scores import TokenScorer
from chip_worker.warm_up import WarmUp, smallest_pool, warm_up

_log = structlog.get_logger(__name__)


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
        self._config = config
        composed = compose(communicator, device, checked=config.debug_backend is not None)
        # A rank alone waits for nobody, and a decode step makes some sixty calls.
        self._communicator = TimedCommunicator(composed) if form.world_size > 1 else composed
        self._runtime = runtime
        self._device = device
        self._loaded = loaded
        self._memory = StepMemory(device)
        spec = kv_spec(loaded.config, loaded.shard, form.block_tokens, loaded.dtype)
        self._pool = open_memory_pool(config, runtime, device, spec, form.blocks_wanted)
        row_tokens_max = form.chunk_tokens + form.slots
        self._tables = SlotTables(
            slots_count=form.slots,
            context_tokens=form.context_tokens,
            block_tokens=form.block_tokens,
            pool=self._pool,
            row_tokens_max=row_tokens_max,
            kv_windows=loaded.kv_groups.windows,
        )
        try:
            kernels = _bind_kernels(runtime, loaded, self._pool, row_tokens_max)
            weight_bytes = loaded.weights.bytes_total
            self._watch = MemoryWatch(device, self._pool, weight_bytes)
            self._kernels = self._watch.watched(kernels)
            self._bind()
        except Exception:
            self._give_memory_back()
            raise

    def _bind(self) -> None:
        form, loaded, kernels, memory = self.form, self._loaded, self._kernels, self._memory
        place = ModelPlace(
            memory,
            kernels,
            self._communicator,
            loaded.shard,
            form.context_tokens,
            overlaps=self._runtime.backend.capabilities.async_collectives,
        )
        model = loaded.model(loaded.config, loaded.weights, place)
        self._runner = ModelRunner(
            model,
            self._pool,
            kernels,
            memory,
            form.vocabulary_tokens or None,
            # A debugged step names the operation it ended in.
            0 if self._config.debug_backend is not None else self._config.captured_tokens,
        )
        scorer = TokenScorer(kernels, memory)
        self._sampler = Sampler(kernels, self._communicator, memory, self._tables, scorer)
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
        for slot in step.releases:
            # Before the rows: one of them may be of a new request in the same slot.
            self.end_request(slot)
        if not rows:
            return StepOutcome()
        with torch.no_grad():
            outcome = self._compute(rows)
        self._memory.end()
        self._watch.observe()
        return outcome

    def _compute(self, rows: Sequence[PlannedRow]) -> StepOutcome:
        """Keeps no tensor of the step: what is on the chip after it is not the step's."""
        batch = build_batch(rows)
        hidden = self._runner.forward(batch)
        logits = self._runner.logits(hidden, batch.sampled_tokens)
        results = self._sampler.sample(logits, [row.slot for row in rows if row.sampled])
        return StepOutcome(results, self._prompt_scorer.score(hidden, rows))

    def end_request(self, slot: int) -> None:
        """The request in `slot` was released: what is kept for it alone goes, here and below."""
        self._device.scratch.reclaim(Lifetime.REQUEST, slot)
        self._runtime.backend.on_request_end(slot)

    def warm_up(self) -> WarmUp:
        """Checks every operation, then times a prefill and a decode step; every rank must call it.

        Raises ProbeFailed, or as `run` does.
        """
        with torch.no_grad():
            probe_numerics(
                self.form, self._runtime, self._kernels, self._memory, self._pool, self._loaded
            )
            blocks = smallest_pool(self._communicator, self._memory, self._pool.capacity)
            groups_count = len(self._loaded.kv_groups.windows)
            return warm_up(
                self.form,
                self._runner,
                self._sampler,
                self._memory,
                self._pool,
                blocks,
                groups_count,
            )

    def abort(self) -> None:
        """Makes a pending collective fail soon; from any thread."""
        self._communicator.abort()

    def close(self) -> None:
        """Gives back communicator, pool and scratch; waits for nobody."""
        self._communicator.close()
        self._runner.end()
        self._give_memory_back()
        self._tables.end()

    def _give_memory_back(self) -> None:
        self._pool.close()
        try:
            self._device.scratch.reclaim(Lifetime.MODEL)
        except BackendError as error:
            # A lost chip refuses even this; the fault that ended the epoch is what counts.
            _log.warning("formation.memory_not_reclaimed", error=str(error))


def _bind_kernels(
    runtime: BackendRuntime, loaded: LoadedShard, pool: MemoryPool, rows_max: int
) -> KernelTable:
    requirements = loaded.model.requirements(
        loaded.config, loaded.shard, loaded.dtype_name, pool.layout.order, rows_max
    )
    return runtime.bind_kernels({**requirements, **sampler_requirements(rows_max)})

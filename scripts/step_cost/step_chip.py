"""One chip of this process, stepped as a control plane steps it; importing this imports torch.

open_runtime --> Session: FormGroup, then Step after Step
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

from backends.interface import BackendRuntime, open_runtime
from backends.plugin import Backend, BackendConfig
from chip_worker.batch import (
    Admission,
    Fault,
    FormGroup,
    Report,
    Shutdown,
    SlotSampling,
    Step,
    StepRow,
)
from chip_worker.config import WorkerConfig
from chip_worker.session import Session
from chip_worker.shard_loader import ShardLoader
from scripts.step_cost.costs import Extent, Load, StepFailed

TERM, EPOCH = 1, 1
DEADLINE_S = 600.0
BLOCK_TOKENS = 16
ID_STRIDE = 7

_step = partial(Step, TERM, EPOCH, 0)
"""A step without its number."""

Wrap = Callable[[BackendRuntime], BackendRuntime]


class StepChip:
    """A group of one chip whose first slots hold prompts of `extent.context` tokens.

    wrap: what the worker computes through. Raises StepFailed, BackendError or ModelError.
    """

    def __init__(
        self,
        config: WorkerConfig,
        backend: Backend,
        backend_config: BackendConfig,
        extent: Extent,
        wrap: Wrap = lambda runtime: runtime,
    ) -> None:
        self._fault: Fault | None = None
        self._loader = ShardLoader(config.model_path, config.weights)
        runtime = wrap(open_runtime(backend, backend_config))
        self._session = Session(config, backend, runtime, self._loader, self._take)
        self._kv_groups_count = len(self._session.kv_windows)
        self._step_id = 0
        self._extent = extent
        context_tokens = self._session.fingerprint.context_tokens
        if extent.tokens_max > context_tokens:
            raise StepFailed(
                f"these steps need a context of {extent.tokens_max} tokens, the model has "
                f"{context_tokens}; give a smaller --context or --chunks, or fewer --repeats"
            )
        self._form()

    @property
    def weight_bytes(self) -> int:
        """Of the model's weights as the chip holds them."""
        return self._loader.loaded.weights.bytes_total

    @property
    def facts(self) -> dict[str, str]:
        """What it is and what it computes, for people."""
        return {
            "chip": self._session.chip.description,
            "dtype": self._session.dtype_name,
            "architecture": self._session.fingerprint.architecture,
        }

    def run(self, load: Load) -> float:
        """Seconds of one step of this load. Raises StepFailed."""
        rows = tuple(StepRow(slot, 1, sampled=True) for slot in range(load.rows))
        if not load.chunk_tokens:
            return self._step(_step(rows=rows))
        slot = self._extent.rows_max
        chunk = StepRow(slot, load.chunk_tokens, sampled=True)
        seconds = self._step(
            _step(
                admissions=(self._admission(slot, load.chunk_tokens),),
                new_blocks=self._blocks_of(slot),
                rows=(*rows, chunk),
            )
        )
        self._step(_step(releases=(slot,)))
        return seconds

    def close(self) -> None:
        """Gives the chip back."""
        self._session.handle(Shutdown("it is measured"))
        self._session.close()

    # ---------------------------------------------------------------- inside

    def _form(self) -> None:
        extent = self._extent
        self._session.handle(
            FormGroup(
                term=TERM,
                group_id="g0",
                epoch=EPOCH,
                rank=0,
                world_size=1,
                deadline_s=DEADLINE_S,
                block_tokens=BLOCK_TOKENS,
                slots=extent.rows_max + 1,
                chunk_tokens=extent.chunk_tokens_max,
                context_tokens=extent.tokens_max,
                kv_policy="cover",
                step_deadline_s=DEADLINE_S,
                blocks_wanted=(extent.rows_max + 1) * self._kv_groups_count * self._blocks_each,
            )
        )
        self._raise_fault()
        for slot in range(extent.rows_max):
            left = extent.context
            step = _step(
                admissions=(self._admission(slot, left),), new_blocks=self._blocks_of(slot)
            )
            while left:
                tokens = min(left, extent.chunk_tokens_max)
                left -= tokens
                self._step(replace(step, rows=(StepRow(slot, tokens, sampled=not left),)))
                step = _step()

    @property
    def _blocks_each(self) -> int:
        return -(-self._extent.tokens_max // BLOCK_TOKENS)

    def _blocks_of(self, slot: int) -> tuple[tuple[int, int, int], ...]:
        """All it will ever need, in every KV group."""
        each = self._blocks_each
        first = slot * self._kv_groups_count * each
        return tuple(
            (slot, kv_group, first + kv_group * each + place)
            for kv_group in range(self._kv_groups_count)
            for place in range(each)
        )

    def _admission(self, slot: int, tokens_count: int) -> Admission:
        """Which ids they are makes no difference to the time."""
        ids_count = self._session.fingerprint.vocabulary_size
        ids = ((slot + ID_STRIDE * place) % ids_count for place in range(tokens_count))
        return Admission(
            slot=slot,
            token_ids=tuple(ids),
            output_start=tokens_count,
            cached_count=0,
            block_tables=((),) * self._kv_groups_count,
            sampling=SlotSampling(temperature=0.0, seed=0),
        )

    def _step(self, step: Step) -> float:
        self._step_id += 1
        step = replace(step, step_id=self._step_id)
        started_s = perf_counter()
        self._session.handle(step)
        seconds = perf_counter() - started_s
        self._raise_fault()
        return seconds

    def _take(self, report: Report) -> None:
        if isinstance(report, Fault):
            self._fault = report

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise StepFailed(self._fault.message)

"""A group of sessions in one process, driven as the control plane would drive it."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from backends.cpu.plugin import CpuBackend
from backends.cpu.runtime import CpuRuntime
from backends.interface import BackendConfig, Communicator, Device, GroupPlace
from chip_worker.batch import (
    Admission,
    FormGroup,
    Rendezvous,
    Report,
    RowResult,
    RowWants,
    SlotSampling,
    Step,
    StepResult,
    StepRow,
)
from chip_worker.config import WorkerConfig
from chip_worker.session import Session
from chip_worker.shard_loader import ShardLoader
from tests.fakes.rank_threads import Meeting, ThreadCommunicator, run_ranks

BLOCK_TOKENS = 4
GREEDY = SlotSampling(temperature=0.0, seed=7)


class ThreadRuntime(CpuRuntime):
    """The cpu backend with collectives between threads."""

    def __init__(self, backend: CpuBackend, config: BackendConfig) -> None:
        super().__init__(backend, config)
        self.meeting = Meeting(1)

    def open_rendezvous(self, place: GroupPlace) -> bytes:  # noqa: ARG002
        return b"meeting"

    def create_communicator(
        self, device: Device, place: GroupPlace, rendezvous: bytes
    ) -> Communicator:
        if place.world_size == 1:
            return super().create_communicator(device, place, rendezvous)
        assert rendezvous == b"meeting"
        return ThreadCommunicator(self.meeting, place.rank)


@dataclass
class Rank:
    """One session and what it reported, oldest first."""

    session: Session
    runtime: CpuRuntime
    backend: CpuBackend
    reports: list[Report] = field(default_factory=list)

    @property
    def last(self) -> Report:
        return self.reports[-1]


def open_rank(
    model_path: str,
    dtype: str = "float32",
    backend: CpuBackend | None = None,
    runtime_class: type[CpuRuntime] = ThreadRuntime,
    **settings: object,
) -> Rank:
    """A session without a group."""
    backend_config = BackendConfig(chip_indices=(0,), dtype=dtype)
    backend = backend or CpuBackend()
    backend.on_init(backend_config)
    runtime = runtime_class(backend, backend_config)
    reports: list[Report] = []
    config = WorkerConfig(
        worker_id="chip0", control_plane="", model_path=model_path, dtype=dtype, **settings
    )
    session = Session(
        config, backend, runtime, ShardLoader(model_path, config.weights), reports.append
    )
    return Rank(session, runtime, backend, reports)


def form_command(
    rank: int = 0, world_size: int = 1, *, kv_groups_count: int = 1, **changes: object
) -> FormGroup:
    """A FormGroup of term 1, epoch 1 for tiny models."""
    values: dict[str, Any] = {
        "term": 1,
        "group_id": "g0",
        "epoch": 1,
        "rank": rank,
        "world_size": world_size,
        "deadline_s": 20.0,
        "block_tokens": BLOCK_TOKENS,
        "slots": 4,
        "chunk_tokens": 32,
        "context_tokens": 64,
        "kv_policy": "cover",
        "step_deadline_s": 10.0,
    }
    values |= changes
    blocks = -(-values["context_tokens"] // values["block_tokens"])
    wanted = {"blocks_wanted": values["slots"] * kv_groups_count * blocks}
    return FormGroup(**(wanted | values))


class ComputeGroup:
    """Several ranks of one group; a step goes to all of them at once, as in a real group."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.step_id = 0
        self.term, self.epoch = 1, 1

    @classmethod
    def open(cls, model_path: str, world_size: int = 1, **settings: object) -> "ComputeGroup":
        return cls([open_rank(model_path, **settings) for _ in range(world_size)])

    def form(self, **changes: object) -> "ComputeGroup":
        """Forms the group; every rank must become ready."""
        size = len(self.ranks)
        meeting = Meeting(size)
        groups = len(self.ranks[0].session.kv_windows)
        commands = [
            form_command(rank, size, kv_groups_count=groups, **changes) for rank in range(size)
        ]
        for rank in self.ranks:
            if isinstance(rank.runtime, ThreadRuntime):
                rank.runtime.meeting = meeting

        def lead() -> None:
            self.ranks[0].session.handle(commands[0])

        def follow(rank: Rank, command: FormGroup) -> None:
            rank.session.handle(command)
            rank.session.handle(Rendezvous(command.term, command.epoch, b"meeting"))

        run_ranks(
            [
                lead,
                *(
                    lambda rank=rank, command=command: follow(rank, command)
                    for rank, command in zip(self.ranks[1:], commands[1:], strict=True)
                ),
            ]
        )
        self.term, self.epoch, self.step_id = commands[0].term, commands[0].epoch, 0
        return self

    def step(self, **fields: object) -> tuple[RowResult, ...]:
        """Sends the next step to every rank; returns the rows of rank 0."""
        return self.result(**fields).rows

    def result(self, **fields: object) -> StepResult:
        """Sends the next step to every rank; returns the result of rank 0.

        An uncached admission gets an empty table in every KV group of the model.
        """
        self.step_id += 1
        step = Step(self.term, self.epoch, self.step_id, **fields)
        empty = ((),) * len(self.ranks[0].session.kv_windows)
        admissions = (
            each if each.cached_count else replace(each, block_tables=empty)
            for each in step.admissions
        )
        step = replace(step, admissions=tuple(admissions))
        run_ranks([lambda rank=rank: rank.session.handle(step) for rank in self.ranks])
        result = self.ranks[0].last
        assert isinstance(result, StepResult), result
        return result

    def generate(
        self,
        prompt_ids: list[int],
        count: int,
        chunk: int = 32,
        slot: int = 0,
        sampling: SlotSampling = GREEDY,
        first_block: int = 0,
    ) -> list[RowResult]:
        """Prefill in chunks, then decode; the slot stays occupied.

        Blocks are taken from `first_block` on as they are needed, and again once they are dropped.
        """
        tables = SlotBlocks(slot, self.ranks[0].session.kv_windows, first_block)
        first = {"admissions": (admission(prompt_ids, slot=slot, sampling=sampling),)}
        results: list[RowResult] = []
        start = 0
        while len(results) < count:
            tokens = min(chunk, len(prompt_ids) - start) if start < len(prompt_ids) else 1
            row = StepRow(slot, tokens, start + tokens >= len(prompt_ids))
            results += self.step(**first, **tables.fields(start, start + tokens), rows=(row,))
            first, start = {}, start + tokens
        return results


class SlotBlocks:
    """The block tables of a slot, of every KV group; what is behind a window is dropped at once.

    A dropped block is the next to be given out.
    """

    def __init__(self, slot: int, windows: tuple[int, ...], first_block: int = 0) -> None:
        self._slot = slot
        self._windows = windows
        self._idle: list[int] = []
        self._fresh = itertools.count(first_block)
        self._dropped = [0] * len(windows)
        self.held: list[list[int]] = [[] for _ in windows]

    def fields(self, start: int, stop: int) -> dict[str, object]:
        """What a step that computes the tokens `start` .. `stop` - 1 says of blocks."""
        drops, new_blocks = [], []
        for kv_group, (window, held) in enumerate(zip(self._windows, self.held, strict=True)):
            behind = max(0, start - window + 1) // BLOCK_TOKENS if window else 0
            count = behind - self._dropped[kv_group]
            if count > 0:
                drops.append((self._slot, kv_group, count))
                self._idle += held[:count]
                del held[:count]
                self._dropped[kv_group] = behind
        for kv_group, held in enumerate(self.held):
            while (self._dropped[kv_group] + len(held)) * BLOCK_TOKENS < stop:
                held.append(self._idle.pop() if self._idle else next(self._fresh))
                new_blocks.append((self._slot, kv_group, held[-1]))
        return {"drops": tuple(drops), "new_blocks": tuple(new_blocks)}


def admission(prompt_ids: list[int], slot: int = 0, **changes: object) -> Admission:
    """An uncached admission to a model of one KV group that wants log-probabilities and logits."""
    values: dict[str, object] = {
        "slot": slot,
        "token_ids": tuple(prompt_ids),
        "output_start": len(prompt_ids),
        "cached_count": 0,
        "block_tables": ((),),
        "sampling": GREEDY,
        "wants": RowWants(logprobs=True, logits=True),
    }
    return Admission(**(values | changes))


def token_ids(results: list[RowResult]) -> list[int]:
    """The drawn tokens."""
    return [result.token_ids[0] for result in results]

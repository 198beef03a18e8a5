"""A group of sessions in one process, driven as the control plane would drive it."""

from dataclasses import dataclass, field

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
    session = Session(config, backend, runtime, ShardLoader(model_path), reports.append)
    return Rank(session, runtime, backend, reports)


def form_command(rank: int = 0, world_size: int = 1, **changes: object) -> FormGroup:
    """A FormGroup of term 1, epoch 1 for tiny models."""
    values: dict[str, object] = {
        "term": 1,
        "group_id": "g0",
        "epoch": 1,
        "rank": rank,
        "world_size": world_size,
        "deadline_s": 20.0,
        "block_tokens": 4,
        "slots": 4,
        "chunk_tokens": 32,
        "context_tokens": 64,
        "kv_policy": "cover",
        "step_deadline_s": 10.0,
    }
    return FormGroup(**(values | changes))


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
        commands = [form_command(rank, size, **changes) for rank in range(size)]
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
        """Sends the next step to every rank; returns the result of rank 0."""
        self.step_id += 1
        step = Step(self.term, self.epoch, self.step_id, **fields)
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
        """Prefill in chunks, then decode; the slot stays occupied."""
        blocks = -(-(len(prompt_ids) + count) // 4)
        first: dict[str, object] = {
            "admissions": (admission(prompt_ids, slot=slot, sampling=sampling),),
            "new_blocks": tuple((slot, first_block + block) for block in range(blocks)),
        }
        results: list[RowResult] = []
        for start in range(0, len(prompt_ids), chunk):
            tokens = min(chunk, len(prompt_ids) - start)
            sampled = start + tokens == len(prompt_ids)
            results += self.step(**first, rows=(StepRow(slot, tokens, sampled),))
            first = {}
        while len(results) < count:
            results += self.step(rows=(StepRow(slot, 1, True),))
        return results


def admission(prompt_ids: list[int], slot: int = 0, **changes: object) -> Admission:
    """An uncached admission that wants log-probabilities and logits."""
    values: dict[str, object] = {
        "slot": slot,
        "token_ids": tuple(prompt_ids),
        "output_start": len(prompt_ids),
        "cached_count": 0,
        "block_ids": (),
        "sampling": GREEDY,
        "wants": RowWants(logprobs=True, logits=True),
    }
    return Admission(**(values | changes))


def token_ids(results: list[RowResult]) -> list[int]:
    """The drawn tokens."""
    return [result.token_ids[0] for result in results]

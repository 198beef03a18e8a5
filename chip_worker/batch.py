"""What flows through a worker, as plain records: commands from the control plane, reports back.

    connection  --Command-->  session  --Report-->  connection

The connection turns messages into these records and back (`wire`); the session and everything below
it know nothing of gRPC.
"""

from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """How a slot's tokens are drawn: temperature 0 is greedy; seed and choice key the draws."""

    temperature: float
    seed: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A request enters a slot; ids from `output_start` on are output (a replay).

    The first `cached_count` tokens have keys and values in `block_ids` already.
    """

    slot: int
    token_ids: tuple[int, ...]
    output_start: int
    cached_count: int
    block_ids: tuple[int, ...]
    sampling: SlotSampling
    wants_logprobs: bool = False
    wants_logits: bool = False
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class StepRow:
    """A slot computes `tokens_count` tokens; `sampled`: and draws the next one."""

    slot: int
    tokens_count: int
    sampled: bool


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Become a rank of a group for one epoch; see protos/worker.proto."""

    term: int
    group_id: str
    epoch: int
    rank: int
    world_size: int
    deadline_s: float
    block_tokens: int
    slots: int
    chunk_tokens: int
    context_tokens: int
    kv_policy: str
    step_deadline_s: float


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting point of an epoch: a command to ranks above 0, a report from rank 0."""

    term: int
    epoch: int
    address: bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One step; applied in the order of the fields after step_id."""

    term: int
    epoch: int
    step_id: int
    releases: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    extensions: tuple[tuple[int, tuple[int, ...]], ...] = ()
    new_blocks: tuple[tuple[int, int], ...] = ()
    rows: tuple[StepRow, ...] = ()
    digest: int | None = None
    received_ns: int = 0


@dataclass(frozen=True, slots=True)
class ResetEpoch:
    """The epoch is over: drop keys, values and communicator, keep the weights."""

    term: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave."""

    reason: str


Command = FormGroup | Rendezvous | Step | ResetEpoch | Shutdown


# ---------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class Ready:
    """The shard is loaded, the communicator joined, the model warm."""

    term: int
    epoch: int
    blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    step_credit: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class RowResult:
    """Outcome of a sampled row; logits are little-endian float32 if asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finite: bool = True
    logits: bytes | None = None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where a step's time went on this rank, in nanoseconds."""

    step_id: int
    queue_ns: int = 0
    device_ns: int = 0
    communication_ns: int = 0
    gap_ns: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens of a step, from rank 0; rows in the order of the step's sampled rows."""

    term: int
    epoch: int
    step_id: int
    rows: tuple[RowResult, ...]
    times: StepTimes


@dataclass(frozen=True, slots=True)
class StepAck:
    """Times of a step, from the other ranks; the connection sends several at once."""

    term: int
    epoch: int
    times: tuple[StepTimes, ...] = field(default_factory=tuple)


class FaultKind(Enum):
    """Why a worker cannot go on in an epoch; names as in protos/worker.proto."""

    DEVICE = "device"
    OUT_OF_MEMORY = "out_of_memory"
    PEER = "peer"
    DIVERGED = "diverged"
    MODEL = "model"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Fault:
    """This epoch is over for the worker; `exiting`: and the process ends after saying so."""

    term: int
    epoch: int
    step_id: int
    kind: FaultKind
    message: str
    exiting: bool = False


Report = Rendezvous | Ready | StepResult | StepAck | Fault

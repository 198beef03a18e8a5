"""What flows through a worker, as plain records: commands from the control plane, reports back.

    connection  --Command-->  session  --Report-->  connection

The connection turns messages into these records and back (`wire`); the session and everything below
it know nothing of gRPC.
"""

from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """How a slot's tokens are drawn: temperature 0 is greedy; seed and choice key the draws.

    The order is bias, penalties, suppression, temperature, top_k, top_p, min_p; every default
    changes nothing.
    top_k: 0 keeps all. logit_bias: (token id, bias). suppressed_ids: may not be drawn below the
    output index min_tokens.
    """

    temperature: float
    seed: int
    choice: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppressed_ids: tuple[int, ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RowWants:
    """What a request's rows return besides tokens.

    top_tokens: likeliest tokens listed with each drawn one. prompt_top_tokens: None if the prompt
    is not scored, else likeliest tokens listed with each of its log-probabilities.
    """

    logprobs: bool = False
    top_tokens: int = 0
    prompt_top_tokens: int | None = None
    logits: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """A request enters a slot; ids from `output_start` on are output (a replay).

    The first `cached_count` tokens have keys and values in `block_tables` already, one table for
    each KV group; that of a group with a window holds the last blocks only.
    """

    slot: int
    token_ids: tuple[int, ...]
    output_start: int
    cached_count: int
    block_tables: tuple[tuple[int, ...], ...]
    sampling: SlotSampling
    wants: RowWants = RowWants()
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
    blocks_wanted: int
    kv_policy: str
    step_deadline_s: float
    vocabulary_tokens: int = 0
    probe_deadline_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting point of an epoch: a command to ranks above 0, a report from rank 0."""

    term: int
    epoch: int
    address: bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One step; applied in the order of the fields after step_id.

    drops: (slot, KV group, how many blocks), off the front of the table. new_blocks: (slot, KV
    group, block id), appended to it.
    """

    term: int
    epoch: int
    step_id: int
    releases: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    extensions: tuple[tuple[int, tuple[int, ...]], ...] = ()
    drops: tuple[tuple[int, int, int], ...] = ()
    new_blocks: tuple[tuple[int, int, int], ...] = ()
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
class TopTokens:
    """The likeliest tokens at one place, best first, with their log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RowResult:
    """Outcome of a sampled row; logits are little-endian float32 if asked for.

    tops: the likeliest tokens at the place of each drawn one, if asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[TopTokens, ...] = ()
    finite: bool = True
    logits: bytes | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt tokens that follow those a row computed; there may be none.

    tops: the likeliest tokens at the place of each, if asked for.
    """

    logprobs: tuple[float, ...]
    tops: tuple[TopTokens, ...] = ()


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
    """Tokens of a step, from rank 0; rows in the order of the step's sampled rows.

    prompt_scores: of the rows that score their prompt, in row order.
    """

    term: int
    epoch: int
    step_id: int
    rows: tuple[RowResult, ...]
    times: StepTimes
    prompt_scores: tuple[PromptScores, ...] = ()


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

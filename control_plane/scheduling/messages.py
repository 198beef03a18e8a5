"""Everything that goes into the scheduling core (events) and comes out of it (effects).

    intake    --Submit, Cancel, End-->        core  --Accepted, Tokens, Failed-->    intake
    dispatch  --WorkerAttached, StepDone-->         --FormGroup, SendStep, ...-->    dispatch

`core.handle(event, now) -> list[Effect]`; `now` is seconds of a monotonic clock. All records are
frozen plain values, so that either side can move to another process. Those that every row of every
step needs are named tuples, which are made in a third of the time.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from control_plane.errors import RequestError
from control_plane.request import Request, Sampling

# ---------------------------------------------------------------- the step


@dataclass(frozen=True, slots=True)
class Admission:
    """A request enters a slot: every id known so far (the rest follows as extensions), the index
    from which ids are output, and the block tables of the cached prefix, one for each KV group;
    that of a group with a window holds the last blocks only."""

    slot: int
    token_ids: tuple[int, ...]
    output_start: int
    cached_count: int
    block_tables: tuple[tuple[int, ...], ...]
    sampling: Sampling
    wants_logprobs: bool = False
    top_tokens: int = 0
    prompt_top_tokens: int | None = None
    wants_logits: bool = False
    adapter: int = 0


class StepRow(NamedTuple):
    """A slot computes `tokens_count` tokens; `sampled`: and draws the next one."""

    slot: int
    tokens_count: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All a step says to the workers of a group.

    Applied in the order of the fields: releases, admissions, extensions, drops, new_blocks, rows.
    extensions: (slot, ids) continuing an admission. drops: (slot, KV group, how many blocks), off
    the front of the table, behind the window. new_blocks: (slot, KV group, block id), appended.
    digest: of (slot, length, number of blocks, last block) of every KV group of every occupied slot
    after the step, see `state_digest`; None on steps that carry none.
    """

    group_id: str
    epoch: int
    step_id: int
    releases: tuple[int, ...] = ()
    admissions: tuple[Admission, ...] = ()
    extensions: tuple[tuple[int, tuple[int, ...]], ...] = ()
    drops: tuple[tuple[int, int, int], ...] = ()
    new_blocks: tuple[tuple[int, int, int], ...] = ()
    rows: tuple[StepRow, ...] = ()
    digest: int | None = None


# ---------------------------------------------------------------- events from intake


@dataclass(frozen=True, slots=True)
class Submit:
    """A validated request. Answered at once by Accepted or Failed."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client is gone or asked to stop; answered by Failed unless the request is unknown."""

    request_id: str
    reason: str = "cancelled by the client"


@dataclass(frozen=True, slots=True)
class End:
    """Intake found the end: the first `output_count` tokens are the answer. No effect follows."""

    request_id: str
    output_count: int


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Forget every cached block nobody references; answered by CacheFlushed."""


# ---------------------------------------------------------------- events from dispatch


class LossKind(Enum):
    """How a worker was lost, as far as blame goes."""

    STREAM = "stream"  # the stream broke: the process is gone
    GOODBYE = "goodbye"  # it left on purpose
    DEVICE = "device"  # it reported a fault of its own chip
    PEER = "peer"  # it reported that another rank was lost
    DIVERGED = "diverged"  # it refused a step
    MODEL = "model"  # it cannot load the model
    INTERNAL = "internal"  # an error in its own code


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker process as it introduced itself.

    rows_max: most rows (requests) of a step its chip accepts; 0 is no limit. kv_windows: for every
    KV group of its model the tokens its layers see; 0 is all before. unavailable_reason: None if it
    can serve; else why its chip cannot be used, and the process is about to leave.
    """

    worker_id: str
    incarnation: int
    pid: int
    backend: str
    device: str
    dtype: str
    model_digest: str
    context_tokens: int
    vocabulary_size: int
    block_tokens_multiple: int = 1
    term_highest: int = 0
    batch_invariant: bool = False
    rows_max: int = 0
    kv_windows: tuple[int, ...] = (0,)
    unavailable_reason: str | None = None
    device_id: str = ""
    chip_index: int = 0


@dataclass(frozen=True, slots=True)
class WorkerAttached:
    """A worker said Hello; a newer incarnation replaces an older one of the same name."""

    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class RendezvousOpened:
    """Rank 0 opened the meeting point of an epoch."""

    worker_id: str
    incarnation: int
    epoch: int
    address: bytes


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker loaded its shard and warmed up."""

    worker_id: str
    incarnation: int
    epoch: int
    blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float


@dataclass(frozen=True, slots=True)
class WorkerFaulted:
    """A worker cannot go on in its epoch; its stream stays open.

    exiting: the process is about to end, so that it counts even if the epoch is over.
    """

    worker_id: str
    incarnation: int
    epoch: int
    kind: LossKind
    message: str
    exiting: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's stream ended."""

    worker_id: str
    incarnation: int
    kind: LossKind
    message: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens at one place, best first, with their log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class RowResult(NamedTuple):
    """A sampled row's outcome, in the order of the step's sampled rows.

    token_ids: drawn tokens (one today). tops: the likeliest tokens at the place of each, if asked
    for. finite: False means its logits were not; the request fails. logits: float32 bytes if asked
    for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    tops: tuple[TopTokens, ...] = ()
    finite: bool = True
    logits: bytes | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of consecutive prompt tokens: those after the tokens a row computed."""

    logprobs: tuple[float, ...]
    tops: tuple[TopTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """Rank 0 finished a step; device_s is the time the chips worked on it.

    prompt_scores: of the step's rows that score their prompt, in row order.
    """

    worker_id: str
    incarnation: int
    group_id: str
    epoch: int
    step_id: int
    results: tuple[RowResult, ...]
    device_s: float = 0.0
    prompt_scores: tuple[PromptScores, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: the moment of an earlier WakeAt."""


Event = (
    Submit
    | Cancel
    | End
    | FlushCache
    | WorkerAttached
    | RendezvousOpened
    | WorkerReady
    | WorkerFaulted
    | WorkerLost
    | Heartbeat
    | StepDone
    | Tick
)


# ---------------------------------------------------------------- effects for intake


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What usage reports about a request so far; queue_s: from arrival to its first slot."""

    group_id: str = ""
    cached_tokens: int = 0
    failovers: int = 0
    retractions: int = 0
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued; `tokens_max` is its limit of output tokens (context and memory)."""

    request_id: str
    tokens_max: int


class TokenDelta(NamedTuple):
    """New tokens of one request; first_index is the output index of token_ids[0]."""

    request_id: str
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    facts: RequestFacts
    tops: tuple[TopTokens, ...] = ()
    logits: bytes | None = None


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """Scores of one request's prompt; first_index: index in the prompt of the token scores[0] is
    of. They come in order, without gap or repeat, and before the request's first token."""

    request_id: str
    first_index: int
    scores: PromptScores


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one step, one message for all its requests; prompt_deltas come first."""

    deltas: tuple[TokenDelta, ...]
    prompt_deltas: tuple[PromptDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over without an answer (or without the rest of it)."""

    request_id: str
    error: RequestError


@dataclass(frozen=True, slots=True)
class CacheFlushed:
    """Answer to FlushCache."""

    blocks_freed: int


@dataclass(frozen=True, slots=True)
class ServingChanged:
    """Ids of the groups that serve from now on; empty means the service cannot answer."""

    group_ids: tuple[str, ...]


# ---------------------------------------------------------------- effects for dispatch


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Tells one worker to join a group as a rank.

    block_tokens: tokens in a block of this group; slots: rows of its tables; 0 means the
    configured number.
    """

    worker_id: str
    incarnation: int
    group_id: str
    epoch: int
    rank: int
    world_size: int
    deadline_s: float
    block_tokens: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class SendRendezvous:
    """Gives rank 0's meeting point to another rank."""

    worker_id: str
    incarnation: int
    epoch: int
    address: bytes


@dataclass(frozen=True, slots=True)
class SendStep:
    """The same plan to every worker of the group, in the order of ranks."""

    worker_ids: tuple[str, ...]
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class ResetWorker:
    """The epoch is over for this worker: drop KV and communicator, keep the weights."""

    worker_id: str
    incarnation: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class DropWorker:
    """Close the stream of a superseded or silent incarnation."""

    worker_id: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Condemn:
    """The process is frozen: whoever launched it should kill it."""

    worker_id: str
    incarnation: int
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Call `handle(Tick(), now)` at this time; only the earliest outstanding one counts."""

    when: float


class LogLevel(Enum):
    """How much a log line matters."""

    DEBUG = "debug"  # expected now and then: messages that crossed
    INFO = "info"
    WARNING = "warning"  # something was lost


@dataclass(frozen=True, slots=True)
class Log:
    """Something worth a log line; `event` is a constant name, `fields` its values."""

    event: str
    fields: dict[str, object] = field(default_factory=dict)
    level: LogLevel = LogLevel.INFO


Effect = (
    Accepted
    | Tokens
    | Failed
    | CacheFlushed
    | ServingChanged
    | FormGroup
    | SendRendezvous
    | SendStep
    | ResetWorker
    | DropWorker
    | Condemn
    | WakeAt
    | Log
)


# ---------------------------------------------------------------- snapshots


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as `status` shows it."""

    worker_id: str
    pid: int
    incarnation: int
    state: str
    device: str
    backend: str
    group_id: str
    heartbeat_age_s: float
    blocks: int = 0
    """Capacity of its chip's pool; 0 while it does not serve."""
    reason: str = ""
    """Why its chip is unavailable; empty in every other state."""
    device_id: str = ""
    """What the vendor's tools call its chip; empty where that is the index."""
    chip_index: int = 0
    """Position of its chip among those of its make."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """free + cached + referenced = total."""

    free: int
    cached: int
    referenced: int
    total: int


@dataclass(frozen=True, slots=True)
class GroupSnapshot:
    """A group as `status` shows it.

    predicted_s: what its steps that ended were expected to take together; chunk_step_error and
    decode_step_error: how far those with and those without a chunk were from that lately, as a part
    of it.
    """

    group_id: str
    epoch: int
    worker_ids: tuple[str, ...]
    state: str
    running: int
    waiting: int
    retracted: int
    blocks: BlockCounts
    block_tokens: int
    steps: int
    steps_in_flight: int
    predicted_s: float = 0.0
    chunk_step_error: float = 0.0
    decode_step_error: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole core as `status` shows it."""

    workers: tuple[WorkerSnapshot, ...]
    groups: tuple[GroupSnapshot, ...]
    requests: int
    waiting: int
    running: int
    generated_tokens: int
    failovers: int

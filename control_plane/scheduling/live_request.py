"""A request on its way through scheduling: what is committed, and where it runs now."""

from dataclasses import dataclass, field
from enum import Enum

from control_plane.request import Request
from control_plane.scheduling.messages import RequestFacts
from control_plane.scheduling.residency import Match, Residency, RootKey


class Stage(Enum):
    """Where a request stands."""

    WAITING = "waiting"  # in the queue of a group, or held until a group serves
    RUNNING = "running"  # in a slot
    RETRACTING = "retracting"  # in a slot, until the results of its last steps are back
    OVER = "over"  # ended or failed; late results are dropped


@dataclass(slots=True, eq=False)
class BlockTable:
    """A request's blocks in one KV group: those of places dropped_count, dropped_count + 1, ...

    A place is a block's worth of tokens. Only a group with a window drops its first blocks.
    """

    dropped_count: int
    block_ids: list[int]

    @property
    def end(self) -> int:
        """The first place it has no block for yet."""
        return self.dropped_count + len(self.block_ids)

    def at(self, place: int) -> int | None:
        """The block of a place before its end; None if that is dropped."""
        if place < self.dropped_count:
            return None
        return self.block_ids[place - self.dropped_count]

    def before(self, place: int) -> tuple[int, ...]:
        """What it holds before a place."""
        return tuple(self.block_ids[: max(0, place - self.dropped_count)])

    def since(self, place: int) -> tuple[int, ...]:
        """What it holds from a place on."""
        return tuple(self.block_ids[max(0, place - self.dropped_count) :])


@dataclass(slots=True, eq=False)
class Placement:
    """A request in a slot of a group. Counts are of tokens whose keys and values are

        0 ... computed_count ... planned_count
          results are back     in steps on their way

    admitted_count: ids known when it entered (prefill computes these). sent_count: of them told to
    the workers. tables: its block tables, one for each KV group; covered_count: tokens that all of
    them reach. residencies: the places from the root on that it holds in the index; what its tables
    have there is listed. matched_count: how many of them it found there; those it only reads.
    claims: hashes of blocks it promises to the index. reserved: it holds every block it can ever
    need. indexing: it may extend the index. beside: where the index had another's blocks already,
    the last place there that it passed; only with windows, whose missing blocks it adds on its way.
    scoring: its rows return the log-probabilities of the prompt.
    """

    slot: int
    admitted_count: int
    sent_count: int
    planned_count: int
    computed_count: int
    tables: list[BlockTable]
    covered_count: int
    residencies: list[Residency]
    matched_count: int
    claims: list[int]
    reserved: bool
    indexing: bool
    beside: Residency | None = None
    scoring: bool = False
    rows_in_flight: int = 0

    def blocks_at(self, place: int) -> list[int | None]:
        """Its block of every KV group at a place; None where that is dropped."""
        return [table.at(place) for table in self.tables]


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request from Submit to its end.

    token_ids: prompt and committed output. uses_cache: whether cached prefixes are for it, and its
    own blocks for others. arrival: its place in the queue for all its life.
    front: it lost its group and goes before everyone else. alone: it was running at so many
    group deaths that it shares no step. held_since: when it lost the last group it could use.
    admitted_at: when it first got a slot. scored_count: prompt tokens whose scores are delivered;
    it includes the first, which has none. facts: what usage reports, as of the last `renew_facts`.
    prompt_count: tokens of the prompt. computed_max: most tokens that ever need keys and values,
    all but the last output.
    """

    request: Request
    arrival: int
    arrived_at: float
    tokens_max: int
    token_ids: list[int]
    uses_cache: bool
    stage: Stage = Stage.WAITING
    group_id: str = ""
    placement: Placement | None = None
    front: bool = False
    alone: bool = False
    held_since: float | None = None
    admitted_at: float | None = None
    scored_count: int = 1
    failovers: int = 0
    retractions: int = 0
    group_deaths: int = 0
    cached_tokens: int | None = None
    facts: RequestFacts = field(default_factory=RequestFacts)
    prompt_count: int = field(init=False)
    computed_max: int = field(init=False)
    match: Match | None = None
    block_hashes: list[int] = field(default_factory=list)
    block_hashes_tokens: int = 0

    def __post_init__(self) -> None:
        """Every row of every step asks for these."""
        self.prompt_count = len(self.request.prompt_ids)
        self.computed_max = self.prompt_count + self.tokens_max - 1

    @property
    def request_id(self) -> str:
        """The client's name for it."""
        return self.request.request_id

    @property
    def output_count(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.prompt_count

    @property
    def tokens_left(self) -> int:
        """Output tokens it may yet have."""
        return self.tokens_max - self.output_count

    @property
    def is_complete(self) -> bool:
        """Whether every token it may have is committed; it only waits for intake's End."""
        return self.output_count >= self.tokens_max

    @property
    def lacks_scores(self) -> bool:
        """Whether log-probabilities of its prompt are asked for and not all delivered."""
        asked = self.request.prompt_top_tokens is not None
        return asked and self.scored_count < self.prompt_count

    @property
    def root_key(self) -> RootKey:
        """Its root in the prefix index."""
        return (self.request.model, self.request.adapter, self.request.salt)

    def matchable_blocks(self, block_tokens: int) -> int:
        """Most blocks of a cached prefix that it can use: at least one token is computed, so that
        a full hit gives up its last block."""
        return (len(self.token_ids) - 1) // block_tokens

    def renew_facts(self) -> None:
        """To be called as it gets a slot, or begins to lose it: what usage reports changes then."""
        waited_until = self.arrived_at if self.admitted_at is None else self.admitted_at
        self.facts = RequestFacts(
            group_id=self.group_id,
            cached_tokens=self.cached_tokens or 0,
            failovers=self.failovers,
            retractions=self.retractions,
            queue_s=waited_until - self.arrived_at,
        )

    def hashes(self, block_tokens: int) -> list[int]:
        """Chained hashes of the full blocks of its prompt; equal prefixes have equal hashes."""
        if self.block_hashes_tokens != block_tokens:
            self.block_hashes_tokens = block_tokens
            self.block_hashes = []
            chained = hash(self.root_key)
            prompt_ids = self.request.prompt_ids
            for start in range(0, len(prompt_ids) - block_tokens + 1, block_tokens):
                chained = hash((chained, prompt_ids[start : start + block_tokens]))
                self.block_hashes.append(chained)
        return self.block_hashes

"""Intake without clients: it submits, sees tokens in order, decides ends, cancels, and remembers.

Checks every effect that concerns a request as it comes out of the core.
"""

from dataclasses import dataclass
from random import Random

from control_plane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    RequestError,
    ServiceUnavailable,
    WorkerFailure,
)
from control_plane.request import Request
from control_plane.scheduling.messages import (
    Accepted,
    Cancel,
    End,
    Failed,
    PromptDelta,
    Submit,
    TokenDelta,
    Tokens,
)
from tests.fakes.fake_chip import (
    VOCABULARY_SIZE,
    context_checksum,
    likeliest,
    token_score,
)
from tests.fakes.fake_fleet import VirtualClock


@dataclass
class Conversation:
    """One request as intake sees it. emitted: output tokens so far, resumed ones included."""

    request: Request
    stop_modulus: int
    checksum: int
    emitted: list[int]
    tokens_max: int = 0
    accepted: bool = False
    decided: bool = False
    ended: bool = False
    cancelled: bool = False
    error: RequestError | None = None
    retractions: int = 0
    cached_tokens: int | None = None
    scored_count: int = 1

    @property
    def is_over(self) -> bool:
        return self.ended or self.error is not None


class FakeIntake:
    """The requests of a scenario; `post` takes events for the core."""

    def __init__(self, clock: VirtualClock, random: Random, post, delay_s: float) -> None:
        self.conversations: dict[str, Conversation] = {}
        self._clock = clock
        self._random = random
        self._post = post
        self._delay_s = delay_s

    def submit(self, request: Request, *, stop_modulus: int = 0) -> None:
        """stop_modulus: tokens divisible by it end the answer; 0 means only the length does."""
        checksum = context_checksum([*request.prompt_ids, *request.output_ids])
        conversation = Conversation(request, stop_modulus, checksum, list(request.output_ids))
        self.conversations[request.request_id] = conversation
        self._post(Submit(request))
        assert conversation.accepted or conversation.error, "answered at once"

    def cancel(self, request_id: str) -> None:
        conversation = self.conversations.get(request_id)
        if conversation:
            conversation.cancelled = True
            self._post(Cancel(request_id))
            assert conversation.is_over, "a cancelled request is over at once"

    def take(self, effect: Accepted | Failed | Tokens) -> None:
        match effect:
            case Accepted():
                conversation = self.conversations[effect.request_id]
                assert not conversation.accepted
                conversation.accepted = True
                conversation.tokens_max = effect.tokens_max
                asked = conversation.request.max_tokens
                assert asked is None or effect.tokens_max == asked
            case Failed():
                self._failed(self.conversations[effect.request_id], effect.error)
            case Tokens():
                for scored in effect.prompt_deltas:
                    self._take_scores(self.conversations[scored.request_id], scored)
                for delta in effect.deltas:
                    self._take_delta(self.conversations[delta.request_id], delta)

    def _failed(self, conversation: Conversation, error: RequestError) -> None:
        assert not conversation.is_over, "ends exactly once"
        conversation.error = error
        expected: tuple[type[RequestError], ...] = (WorkerFailure, ServiceUnavailable)
        if conversation.cancelled:
            expected += (RequestCancelled,)
        if conversation.request.deadline is not None:
            expected += (DeadlineExceeded,)
        if not conversation.accepted:
            expected += (InvalidRequest, QueueFull)
        assert isinstance(error, expected), error

    def _take_scores(self, conversation: Conversation, delta: PromptDelta) -> None:
        request = conversation.request
        assert conversation.accepted
        assert not conversation.is_over, "no score after the end"
        assert list(request.output_ids) == conversation.emitted, "scores before the first token"
        assert delta.first_index == conversation.scored_count, "no repeat, no gap"
        conversation.scored_count += len(delta.scores.logprobs)
        places = range(delta.first_index, conversation.scored_count)
        assert conversation.scored_count <= len(request.prompt_ids)
        expected = tuple(token_score(request.prompt_ids[: i + 1]) for i in places)
        assert delta.scores.logprobs == expected, "the score of this token"
        tops_count = request.prompt_top_tokens or 0
        tops = tuple(likeliest(request.prompt_ids[:i], tops_count) for i in places)
        assert delta.scores.tops == (tops if tops_count else ())

    def _take_delta(self, conversation: Conversation, delta: TokenDelta) -> None:
        assert conversation.accepted
        assert not conversation.is_over, "no token after the end"
        assert delta.first_index == len(conversation.emitted), "no repeat, no gap"
        assert len(conversation.emitted) < conversation.tokens_max, "no token beyond the limit"
        (token_id,) = delta.token_ids
        assert token_id == conversation.checksum % VOCABULARY_SIZE, "the undisturbed token"
        assert delta.facts.retractions <= 5
        request = conversation.request
        assert delta.logprobs == ((-0.5,) if request.wants_logprobs else ())
        assert [len(top.token_ids) for top in delta.tops] == [request.top_tokens] * bool(
            request.top_tokens
        )
        if request.prompt_top_tokens is not None:
            assert conversation.scored_count == len(request.prompt_ids), "all scores come first"
        if conversation.cached_tokens is None:
            conversation.cached_tokens = delta.facts.cached_tokens
        assert delta.facts.cached_tokens == conversation.cached_tokens, "of the first admission"
        conversation.retractions = delta.facts.retractions
        conversation.checksum = context_checksum([token_id], conversation.checksum)
        conversation.emitted.append(token_id)
        self._look_for_end(conversation, token_id)

    def _look_for_end(self, conversation: Conversation, token_id: int) -> None:
        if conversation.decided:
            return
        modulus = conversation.stop_modulus
        stops = modulus and token_id % modulus == 0
        count = len(conversation.emitted)
        if not stops and count < conversation.tokens_max:
            return
        conversation.decided = True
        delay_s = self._random.uniform(0.0, 1.0) * self._delay_s
        when = self._clock.now + delay_s
        self._clock.at(when, lambda: self._send_end(conversation, count))

    def _send_end(self, conversation: Conversation, count: int) -> None:
        if conversation.error is None:
            conversation.ended = True
        self._post(End(conversation.request.request_id, count))

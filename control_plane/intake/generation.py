"""One call of a client from arrival to its last piece: all its choices behind one reader.

server --GenerationInput--> Generation.start ... Generation.next_piece --AnswerPiece--> server
core --TokenDelta, PromptDelta, Failed--> Generation --Submit, End, Cancel--> core
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import anyio

from control_plane.errors import DeadlineExceeded, RequestCancelled, RequestError
from control_plane.intake.admission import Admission
from control_plane.intake.admitted import Admitted
from control_plane.intake.answer import Answer
from control_plane.intake.answer_piece import AnswerPiece, Usage
from control_plane.intake.generation_input import GenerationInput
from control_plane.intake.tokenizer import Tokenizer
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import (
    Accepted,
    Cancel,
    End,
    Event,
    Failed,
    PromptDelta,
    Submit,
    TokenDelta,
)


@dataclass(frozen=True, slots=True)
class IntakeParts:
    """What all calls share. post: takes an event to the core; its effects may come meanwhile.

    clock: the core's, in seconds.
    """

    admission: Admission
    tokenizer: Tokenizer
    post: Callable[[Event], None]
    metrics: Metrics
    clock: Callable[[], float]


class Generation:
    """Made by AnswerBook.open only; one reader. The methods of the core's side are the book's.

    register: reserves the choices' ids of the core; raises InvalidRequest if one is taken.
    """

    def __init__(
        self,
        request_id: str,
        protocol: str,
        parts: IntakeParts,
        register: Callable[["Generation", Iterable[str]], None],
    ) -> None:
        self.request_id = request_id
        self._parts = parts
        self._register = register
        self._arrived_at = parts.clock()
        self._admitting: anyio.CancelScope | None = None
        self._admitted: Admitted | None = None
        self._answers: dict[str, Answer] = {}
        self._submitted: dict[str, None] = {}
        """Choices the core still works on, as far as it was told."""
        self._incomplete: set[str] = set()
        self._unread_count = 0
        self._ready: OrderedDict[str, Answer] = OrderedDict()
        """Choices with something to read, the longest waiting first."""
        self._wake = asyncio.Event()
        self._error: RequestError | None = None
        self._over = False
        self._first_token_seen = False
        self._prompts_counted: set[int] = set()
        self._group_id = ""
        parts.metrics.request_received(protocol)

    @property
    def admitted(self) -> Admitted:
        """The checked call; only after `start`."""
        assert self._admitted is not None, "the call was not started"
        return self._admitted

    @property
    def core_ids(self) -> Iterable[str]:
        """What the core calls its choices; none before they are admitted."""
        return self._answers.keys()

    @property
    def logits(self) -> bytes | None:
        """float32 logits the first choice's last token was drawn from, if they were asked for."""
        return next(iter(self._answers.values())).logits

    # ---------------------------------------------------------------- the server's side

    async def start(self, wanted: GenerationInput) -> None:
        """Checks and tokenizes the call and submits every choice; raises RequestError.

        A cancel meanwhile, or the deadline, ends the wait for a thread that tokenizes.
        """
        try:
            self._admitted = await self._admit(wanted)
            answers = [Answer(each, self._parts.tokenizer) for each in self._admitted.choices]
            self._register(self, [answer.choice.request.request_id for answer in answers])
        except RequestError as error:
            self.fail(error)
            raise
        self._answers = {answer.choice.request.request_id: answer for answer in answers}
        self._incomplete = set(self._answers)
        self._unread_count = len(answers)
        for answer in answers:
            self._submit(answer)
        self._raise_error()

    async def next_piece(self) -> AnswerPiece | None:
        """Waits for more; None after the last piece. Raises the RequestError that ended it."""
        while not self._ready:
            self._raise_error()
            if not self._unread_count:
                return None
            self._wake.clear()
            await self._wake.wait()
        _, answer = self._ready.popitem(last=False)
        piece = answer.take_piece()
        if piece.finish_reason is not None:
            self._unread_count -= 1
            if not self._unread_count:
                return replace(piece, usage=self._usage())
        return piece

    def cancel(self, reason: str) -> bool:
        """Ends the call with RequestCancelled; False if it is over already."""
        return self.fail(RequestCancelled(reason))

    def fail(self, error: RequestError) -> bool:
        """Ends the call with an error; what came before it can still be read. False if it is over
        already."""
        if self._over:
            return False
        self._error = error
        self._finished(error.reason)
        if self._admitting is not None:
            self._admitting.cancel()
        self._wake.set()
        while self._submitted:
            self._parts.post(Cancel(self._submitted.popitem()[0], error.message))
        return True

    # ---------------------------------------------------------------- the core's side

    def accepted(self, effect: Accepted) -> None:
        """A choice is queued, with the core's own limit of tokens."""
        if not self._over:
            answer = self._answers[effect.request_id]
            answer.accept(effect.tokens_max)
            self._look_at(answer)

    def failed(self, effect: Failed) -> None:
        """A choice is over without an end: so is the call."""
        self._submitted.pop(effect.request_id, None)
        self.fail(effect.error)

    def take_prompt(self, delta: PromptDelta) -> None:
        """Scores of a choice's prompt."""
        if not self._over:
            answer = self._answers[delta.request_id]
            answer.take_prompt(delta)
            self._look_at(answer)

    def take(self, delta: TokenDelta) -> None:
        """Tokens of a choice; those after its end are dropped."""
        answer = self._answers[delta.request_id]
        if self._error is not None:
            return
        taken_count = answer.take(delta)
        self._group_id = answer.facts.group_id
        if taken_count:
            self._measure(answer, taken_count)
            self._look_at(answer)

    # ---------------------------------------------------------------- inside

    async def _admit(self, wanted: GenerationInput) -> Admitted:
        self._raise_error()
        with anyio.CancelScope() as self._admitting:
            if wanted.deadline is not None:
                left_s = wanted.deadline - self._parts.clock()
                self._admitting.deadline = anyio.current_time() + left_s
            return await self._parts.admission.admit(self.request_id, wanted)
        self._raise_error()
        raise DeadlineExceeded("the deadline passed before the prompt was tokenized")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _submit(self, answer: Answer) -> None:
        submission = answer.submission
        if submission is None:
            self._look_at(answer)
        elif not self._over:
            self._submitted[submission.request_id] = None
            self._parts.post(Submit(submission))

    def _look_at(self, answer: Answer) -> None:
        """After every change of a choice: is there something to read, is it complete?"""
        request_id = answer.choice.request.request_id
        if answer.has_piece:
            self._ready[request_id] = answer
            self._wake.set()
        if answer.finish_reason is None or request_id not in self._incomplete:
            return
        self._count_prompt(answer)
        self._incomplete.remove(request_id)
        if not self._incomplete:
            self._finished(answer.finish_reason.value)
        if request_id in self._submitted:
            del self._submitted[request_id]
            self._parts.post(End(request_id, answer.computed_count))

    def _finished(self, reason: str) -> None:
        self._over = True
        self._parts.metrics.request_finished(reason, self._parts.clock() - self._arrived_at)

    def _measure(self, answer: Answer, count: int) -> None:
        now, metrics = self._parts.clock(), self._parts.metrics
        if not self._first_token_seen:
            self._first_token_seen = True
            metrics.queue_time(answer.facts.queue_s)
            metrics.first_token(now - self._arrived_at)
        if answer.tokens_at is not None:
            metrics.inter_token(now - answer.tokens_at, count)
        answer.tokens_at = now
        metrics.generation_tokens(count)
        self._count_prompt(answer)

    def _count_prompt(self, answer: Answer) -> None:
        """Once a prompt, when something of it was computed."""
        request_id, prompt_index = answer.choice.request.request_id, answer.choice.prompt_index
        if request_id in self._submitted and prompt_index not in self._prompts_counted:
            self._prompts_counted.add(prompt_index)
            self._parts.metrics.prompt_tokens(
                len(answer.choice.request.prompt_ids), answer.facts.cached_tokens
            )

    def _usage(self) -> Usage:
        answers = list(self._answers.values())
        firsts = {answer.choice.prompt_index: answer for answer in reversed(answers)}.values()
        return Usage(
            prompt_tokens=sum(len(answer.choice.request.prompt_ids) for answer in firsts),
            completion_tokens=sum(answer.count for answer in answers),
            cached_tokens=sum(answer.facts.cached_tokens for answer in firsts),
            group_id=self._group_id,
            failovers=sum(answer.facts.failovers for answer in answers),
            retractions=sum(answer.facts.retractions for answer in answers),
            seed=self.admitted.seed,
        )

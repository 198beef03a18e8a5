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
from control_plane.intake.answer_piece import AnswerPiece
from control_plane.intake.call_measures import CallMeasures
from control_plane.intake.generation_input import GenerationInput
from control_plane.intake.loop_turns import LoopTurns
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

SUBMITTED_IDS_MAX = 1 << 14
"""The loop gets a turn after so many ids of choices: the core takes a few milliseconds for them."""


CLIENT_AHEAD_S = 0.1
"""A client's own timer began before its call arrived: it may leave so much before its deadline."""


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
        self._measures = CallMeasures(parts.metrics, parts.clock, protocol)
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
        self._deadline: float | None = None

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
        self._deadline = wanted.deadline
        self._admitted = await self._admit(wanted)
        turns = LoopTurns(SUBMITTED_IDS_MAX)
        answers = []
        for choice in self._admitted.choices:
            answers.append(Answer(choice, self._parts.tokenizer))
            await turns.did(len(choice.request.output_ids))
        by_core_id = {answer.choice.request.request_id: answer for answer in answers}
        self._register(self, by_core_id)
        self._answers = by_core_id
        self._incomplete = set(by_core_id)
        self._unread_count = len(answers)
        self._measures.submits(answers)
        for answer in answers:
            self._raise_error()
            self._submit(answer)
            await turns.did(len(answer.choice.request.prompt_ids))
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
                return replace(piece, usage=self._measures.usage(self.admitted.seed))
        return piece

    def cancel(self, reason: str) -> bool:
        """Ends the call with RequestCancelled; False if it is over already."""
        return self.fail(RequestCancelled(reason))

    def client_left(self) -> None:
        """Ends the call unless it is over: its deadline passed, or nobody waits for it any more."""
        if self._deadline is not None and self._parts.clock() >= self._deadline - CLIENT_AHEAD_S:
            self.fail(DeadlineExceeded("the request's deadline passed"))
        else:
            self.fail(RequestCancelled("the client is gone"))

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
        self._measures.heard(answer, taken_count)
        if taken_count:
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
        else:
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
        self._measures.count_prompt(answer)
        self._incomplete.remove(request_id)
        if not self._incomplete:
            self._finished(answer.finish_reason.value)
        if request_id in self._submitted:
            del self._submitted[request_id]
            self._parts.post(End(request_id, answer.computed_count))

    def _finished(self, reason: str) -> None:
        self._over = True
        self._measures.finished(reason)

"""One answer on its way to a client: finds the end, in token order, and holds what is not yet read.

core --TokenDelta--> Answer.take ... Answer.next_piece --> server
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from control_plane.errors import RequestError
from control_plane.intake.admission import Admitted
from control_plane.intake.detokenizer import Detokenizer
from control_plane.intake.tokenizer import Tokenizer
from control_plane.request import FinishReason, Request
from control_plane.scheduling.messages import RequestFacts, TokenDelta


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts and facts of a finished answer; as in protos/inference.proto."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    group_id: str
    failovers: int
    retractions: int
    seed: int


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What came since the piece before; first_index: output index of token_ids[0].

    text: whole characters only, without the text of the token that ended the answer. logprobs: one
    a token if asked for, else empty. finish_reason, usage: set in the last piece.
    """

    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


class Answer:
    """One writer (the core's effects) and one reader (a server).

    Tokens the reader has not taken yet are joined into one piece, at most `output_tokens_max` of
    them, so a slow reader costs memory but never time. on_end: called with the count of output
    tokens when the answer is complete, exactly once.
    """

    def __init__(
        self, admitted: Admitted, tokenizer: Tokenizer, on_end: Callable[[int], None]
    ) -> None:
        self.request: Request = admitted.request
        self.logits: bytes | None = None
        self._stop_ids = admitted.stop_ids
        self._tokens_max = admitted.output_tokens_max
        self._on_end = on_end
        self._detokenizer = Detokenizer(tokenizer)
        self._facts = RequestFacts()
        self._finish_reason: FinishReason | None = None
        self._error: RequestError | None = None
        self._last_piece_taken = False
        self._wake = asyncio.Event()
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._texts: list[str] = []
        self._count = 0
        self._resume()

    @property
    def over(self) -> bool:
        """Nothing more will come: complete or failed."""
        return self._finish_reason is not None or self._error is not None

    @property
    def facts(self) -> RequestFacts:
        """Latest facts from the core."""
        return self._facts

    # ---------------------------------------------------------------- the core's side

    def accept(self, tokens_max: int) -> None:
        """The core's own limit of output tokens is known."""
        self._tokens_max = min(self._tokens_max, tokens_max)
        if not self.over and self._count >= self._tokens_max:
            self._finish(FinishReason.LENGTH)
            self._on_end(self._count)

    def take(self, delta: TokenDelta) -> None:
        """Adds tokens up to the end of the answer; what comes after it is dropped."""
        if self.over:
            return
        assert delta.first_index == self._count, "the core skipped or repeated a token"
        self._facts = delta.facts
        if delta.logits is not None:
            self.logits = delta.logits
        taken_count = 0
        for token_id in delta.token_ids:
            taken_count += 1
            self._token_ids.append(token_id)
            if self._count_token(token_id):
                break
        self._logprobs.extend(delta.logprobs[:taken_count])
        self._wake.set()
        if self._finish_reason is not None:
            self._on_end(self._count)

    def fail(self, error: RequestError) -> None:
        """The answer ends here with an error; what came before it can still be read."""
        if not self.over:
            self._error = error
            self._wake.set()

    # ---------------------------------------------------------------- the reader's side

    async def next_piece(self) -> AnswerPiece | None:
        """Waits for more; None after the last piece. Raises the RequestError that ended it."""
        while True:
            if self._token_ids or (self._finish_reason is not None and not self._last_piece_taken):
                return self._take_piece()
            if self._error is not None:
                raise self._error
            if self._last_piece_taken:
                return None
            self._wake.clear()
            await self._wake.wait()

    def _take_piece(self) -> AnswerPiece:
        finished = self._finish_reason is not None
        piece = AnswerPiece(
            first_index=self._count - len(self._token_ids),
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            logprobs=tuple(self._logprobs),
            finish_reason=self._finish_reason,
            usage=self._usage() if finished else None,
        )
        self._last_piece_taken = finished
        self._token_ids.clear()
        self._texts.clear()
        self._logprobs.clear()
        return piece

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=self._count,
            cached_tokens=self._facts.cached_tokens,
            group_id=self._facts.group_id,
            failovers=self._facts.failovers,
            retractions=self._facts.retractions,
            seed=self.request.sampling.seed,
        )

    # ---------------------------------------------------------------- the end

    def _resume(self) -> None:
        """Counts what the client already has; a complete answer needs no work at all."""
        for token_id in self.request.output_ids:
            if self._count_token(token_id):
                break
        # The client has their text too; what the last ones began is held by the detokenizer.
        self._texts.clear()

    def _count_token(self, token_id: int) -> bool:
        """Counts one token, in order; True if it ends the answer."""
        self._count += 1
        if token_id in self._stop_ids:
            self._finish(FinishReason.STOP)
            return True
        if text := self._detokenizer.feed(token_id):
            self._texts.append(text)
        if self._count >= self._tokens_max:
            self._finish(FinishReason.LENGTH)
            return True
        return False

    def _finish(self, reason: FinishReason) -> None:
        self._finish_reason = reason
        self._texts.append(self._detokenizer.flush())
        self._wake.set()

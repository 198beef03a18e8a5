"""One choice on its way to a client: finds its end, in token order, and holds what is not yet read.

core --TokenDelta, PromptDelta--> Answer.take ... Answer.take_piece --> Generation
"""

from dataclasses import replace

from control_plane.intake.admitted import AdmittedChoice
from control_plane.intake.answer_piece import AnswerPiece
from control_plane.intake.detokenizer import Detokenizer
from control_plane.intake.stop_matcher import StopMatcher
from control_plane.intake.tokenizer import Tokenizer
from control_plane.request import FinishReason, Request
from control_plane.scheduling.messages import PromptDelta, RequestFacts, TokenDelta, TopTokens


class Answer:
    """What the reader has not taken is joined into one piece: at most `output_tokens_max` tokens
    and the scores of one prompt, so a slow reader costs memory but never time.
    """

    def __init__(self, choice: AdmittedChoice, tokenizer: Tokenizer) -> None:
        self.choice = choice
        self.facts = RequestFacts()
        self.logits: bytes | None = None
        self.count = 0
        self._ends = choice.ends
        self._tokens_max = choice.ends.output_tokens_max
        self._detokenizer = Detokenizer(tokenizer, choice.request.prompt_ids)
        self._matcher = StopMatcher(choice.ends.stop_strings)
        self._reason: FinishReason | None = None
        scored = choice.request.prompt_top_tokens is not None
        self._scores_missing = len(choice.request.prompt_ids) - 1 if scored else 0
        self._last_piece_taken = False
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[TopTokens] = []
        self._texts: list[str] = []
        """Of each token; without tokens, what was held back of those the client has."""
        self._prompt_deltas: list[PromptDelta] = []
        self._resume()
        self._draws = self._reason is None

    @property
    def submission(self) -> Request | None:
        """What the core is asked for; None if there is nothing to compute."""
        if self.complete:
            return None
        request = self.choice.request
        if self._draws:
            return request
        # Only the prompt is to be scored; the core draws a token in any case.
        return replace(request, output_ids=(), max_tokens=1)

    @property
    def complete(self) -> bool:
        """Whether nothing more will come: the end is found, and every score is here."""
        return self._reason is not None and not self._scores_missing

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, once it is complete."""
        return self._reason if self.complete else None

    @property
    def computed_count(self) -> int:
        """Output tokens the core keeps: none where it was asked for scores only."""
        return self.count if self._draws else 0

    # ---------------------------------------------------------------- the core's side

    def accept(self, tokens_max: int) -> None:
        """The core's own limit of output tokens is known."""
        if self._reason is not None:
            return
        self._tokens_max = min(self._tokens_max, tokens_max)
        if self.count >= self._tokens_max:
            self._texts.append(self._finish(FinishReason.LENGTH))
            # It has all its tokens, so the core computes nothing more of it.
            self._scores_missing = 0

    def take(self, delta: TokenDelta) -> int:
        """Adds tokens up to the end of the answer and drops the rest; returns how many it added."""
        if self._reason is not None:
            if not self._draws:
                self.facts = delta.facts
            return 0
        assert delta.first_index == self.count, "the core skipped or repeated a token"
        self.facts = delta.facts
        if delta.logits is not None:
            self.logits = delta.logits
        taken_count = 0
        for token_id in delta.token_ids:
            taken_count += 1
            self._token_ids.append(token_id)
            self._texts.append(self._count_token(token_id))
            if self._reason is not None:
                break
        request = self.choice.request
        if request.wants_logprobs:
            self._logprobs.extend(delta.logprobs[:taken_count])
        if request.top_tokens:
            self._tops.extend(delta.tops[:taken_count])
        return taken_count

    def take_prompt(self, delta: PromptDelta) -> None:
        """Adds scores of the prompt."""
        if self._scores_missing:
            self._prompt_deltas.append(delta)
            self._scores_missing -= len(delta.scores.logprobs)

    # ---------------------------------------------------------------- the reader's side

    @property
    def has_piece(self) -> bool:
        """Whether there is something to take."""
        finished = self.complete and not self._last_piece_taken
        return bool(self._token_ids or self._prompt_deltas or finished)

    def take_piece(self) -> AnswerPiece:
        """All that came since the piece before; `usage` is the caller's to add."""
        piece = AnswerPiece(
            choice=self.choice.index,
            first_index=self.count - len(self._token_ids),
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            texts=tuple(self._texts) if self._token_ids else (),
            logprobs=tuple(self._logprobs),
            tops=tuple(self._tops),
            prompt_deltas=tuple(self._prompt_deltas),
            finish_reason=self.finish_reason,
        )
        self._last_piece_taken = self.complete
        self._token_ids.clear()
        self._texts.clear()
        self._logprobs.clear()
        self._tops.clear()
        self._prompt_deltas.clear()
        return piece

    # ---------------------------------------------------------------- the end

    def _resume(self) -> None:
        """Counts what the client already has; a complete answer needs no work at all."""
        if not self._tokens_max:
            self._reason = FinishReason.LENGTH
        for token_id in self.choice.request.output_ids:
            # The client has its text too; what it began is held back for the next.
            self._count_token(token_id)
            if self._reason is not None:
                break

    def _count_token(self, token_id: int) -> str:
        """Counts one token, in order; returns the text that is certain with it."""
        self.count += 1
        may_stop = self.count >= self._ends.min_tokens
        if may_stop and token_id in self._ends.stop_ids:
            return self._finish(FinishReason.STOP)
        text = self._matcher.feed(self._detokenizer.feed(token_id), may_stop=may_stop)
        if self._matcher.stopped:
            self._reason = FinishReason.STOP
        elif self.count >= self._tokens_max:
            text += self._finish(FinishReason.LENGTH)
        return text

    def _finish(self, reason: FinishReason) -> str:
        """The held text; what stands for a cut character may complete a stop string, too."""
        may_stop = self.count >= self._ends.min_tokens
        text = self._matcher.feed(self._detokenizer.flush(), may_stop=may_stop)
        text += self._matcher.flush()
        self._reason = FinishReason.STOP if self._matcher.stopped else reason
        return text

"""One choice of a call on its way into HTTP's formats: what of its prompt is still to be written.

Generation --AnswerPiece--> ChoiceProgress --> AnswerFormat
"""

from collections.abc import Sequence

from control_plane.intake.admitted import AdmittedChoice
from control_plane.intake.answer_piece import AnswerPiece
from control_plane.intake.http_logprobs import ScoredTokens
from control_plane.request import Request
from control_plane.scheduling.messages import TopTokens


class ChoiceProgress:
    """Gathers the scores of a prompt until they are complete."""

    def __init__(self, choice: AdmittedChoice) -> None:
        self.request: Request = choice.request
        self.prompt_text = choice.prompt_text or ""
        self.begun = False
        """Something of it was written."""
        self._logprobs: list[float | None] = [None]
        self._tops: list[TopTokens | None] = [None]

    @property
    def prompt_due(self) -> bool:
        """The prompt is scored, and not all of its scores have come."""
        scored = self.request.prompt_top_tokens is not None
        return scored and len(self._logprobs) < len(self.request.prompt_ids)

    def take(self, piece: AnswerPiece) -> None:
        """Keeps the scores of the prompt that came with the piece."""
        for delta in piece.prompt_deltas:
            assert delta.first_index == len(self._logprobs), "scores were skipped or repeated"
            self._logprobs.extend(delta.scores.logprobs)
            self._tops.extend(delta.scores.tops)

    def scored_prompt(self) -> ScoredTokens:
        """The whole prompt with its scores."""
        assert not self.prompt_due, "the answer began before the prompt was scored"
        count = len(self._logprobs)
        tops = self._tops if len(self._tops) == count else [None] * count
        return ScoredTokens(self.request.prompt_ids, self._logprobs, tops)


def joined(pieces: Sequence[AnswerPiece]) -> AnswerPiece:
    """The pieces of one choice as one."""
    last = pieces[-1]
    return AnswerPiece(
        choice=last.choice,
        first_index=pieces[0].first_index,
        token_ids=tuple(each for part in pieces for each in part.token_ids),
        text="".join(part.text for part in pieces),
        logprobs=tuple(each for part in pieces for each in part.logprobs),
        tops=tuple(each for part in pieces for each in part.tops),
        prompt_deltas=tuple(each for part in pieces for each in part.prompt_deltas),
        finish_reason=last.finish_reason,
        usage=last.usage,
    )

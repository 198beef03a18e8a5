"""Prompts and choices of a call on their way into HTTP's formats: what has come, what is written.

Generation --AnswerPiece--> PromptProgress, ChoiceProgress --> AnswerFormat
"""

from collections.abc import Sequence

from control_plane.intake.admitted import AdmittedChoice
from control_plane.intake.answer_piece import AnswerPiece
from control_plane.intake.http_logprobs import ScoredTokens, TextOffsets
from control_plane.intake.tokenizer import Tokenizer
from control_plane.scheduling.messages import PromptDelta, TopTokens


class PromptProgress:
    """A prompt for all of its choices. Its scores come with the first of them, and what comes of
    the others before the scores are complete is held: at most what their answers may have."""

    def __init__(self, first: AdmittedChoice) -> None:
        self.token_ids = first.request.prompt_ids
        self._scored = first.request.prompt_top_tokens is not None
        self._logprobs: list[float | None] = [None]
        self._tops: list[TopTokens | None] = [None]
        self._held: dict[int, list[AnswerPiece]] = {}
        """By choice."""

    @property
    def due(self) -> bool:
        """The prompt is scored, and not all of its scores have come."""
        return self._scored and len(self._logprobs) < len(self.token_ids)

    def take(self, deltas: Sequence[PromptDelta]) -> None:
        """Keeps the scores that came with a piece."""
        for delta in deltas:
            assert delta.first_index == len(self._logprobs), "scores were skipped or repeated"
            self._logprobs.extend(delta.scores.logprobs)
            self._tops.extend(delta.scores.tops)

    def ready(self, piece: AnswerPiece) -> Sequence[AnswerPiece]:
        """What can be written now that the piece came: nothing before the scores are complete, and
        then of each choice, as one piece, what had to wait for them."""
        self.take(piece.prompt_deltas)
        if not self.due and not self._held:
            return (piece,)
        self._held.setdefault(piece.choice, []).append(piece)
        if self.due:
            return ()
        held, self._held = self._held, {}
        return [joined(pieces) for pieces in held.values()]

    def scores(self) -> ScoredTokens:
        """The whole prompt with its scores."""
        assert not self.due, "an answer began before its prompt was scored"
        count = len(self._logprobs)
        tops = self._tops if len(self._tops) == count else [None] * count
        return ScoredTokens(self.token_ids, self._logprobs, tops)


class ChoiceProgress:
    """One choice. prompt_text: what an echo puts before its text, or None."""

    def __init__(
        self, choice: AdmittedChoice, prompt: PromptProgress, tokenizer: Tokenizer
    ) -> None:
        self.prompt = prompt
        self.prompt_text = choice.prompt_text
        self.is_first = choice.request.sampling.choice == 0
        """Of its prompt: what is said of the prompt itself is said there."""
        self.offsets = TextOffsets(tokenizer, prompt.token_ids, choice.prompt_text or "")
        self.begun = False
        """Something of it was written."""


def progress_of(choices: Sequence[AdmittedChoice], tokenizer: Tokenizer) -> list[ChoiceProgress]:
    """Of every choice of a call; those of a prompt share its progress."""
    prompts: dict[int, PromptProgress] = {}
    for choice in choices:
        if choice.prompt_index not in prompts:
            prompts[choice.prompt_index] = PromptProgress(choice)
    return [ChoiceProgress(each, prompts[each.prompt_index], tokenizer) for each in choices]


def joined(pieces: Sequence[AnswerPiece]) -> AnswerPiece:
    """The pieces of one choice as one, without the scores of its prompt."""
    last = pieces[-1]
    return AnswerPiece(
        choice=last.choice,
        first_index=pieces[0].first_index,
        token_ids=tuple(each for part in pieces for each in part.token_ids),
        text="".join(part.text for part in pieces),
        logprobs=tuple(each for part in pieces for each in part.logprobs),
        tops=tuple(each for part in pieces for each in part.tops),
        finish_reason=last.finish_reason,
        usage=last.usage,
    )

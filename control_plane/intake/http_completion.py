"""The format of /v1/completions: texts, which an echo begins with the prompt."""

from typing_extensions import override

from control_plane.intake.answer_piece import AnswerPiece
from control_plane.intake.http_choice import ChoiceProgress
from control_plane.intake.http_format import AnswerFormat
from control_plane.intake.http_logprobs import ScoredTokens


class CompletionFormat(AnswerFormat):
    """/v1/completions. What is said of a prompt is said in its first choice."""

    whole_object = chunk_object = "text_completion"

    @override
    def _opening(self, index: int, progress: ChoiceProgress) -> bytes:
        return b""

    @override
    def _streamed_choice(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        echo = "" if progress.begun else progress.prompt_text or ""
        fields: dict[str, object] = {"text": echo + piece.text}
        if self._call.return_token_ids and progress.is_first and not progress.begun:
            fields["prompt_token_ids"] = progress.prompt.token_ids
        return fields

    @override
    def _whole_choice(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        fields = self._streamed_choice(piece, progress)
        return fields | self._prompt_logprobs(progress) if progress.is_first else fields

    @override
    def _logprobs(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        of_piece = progress.offsets.of(piece.token_ids)
        if progress.begun or progress.prompt_text is None:
            scored = ScoredTokens(piece.token_ids, piece.logprobs, piece.tops)
            return self._writer.completion(scored, of_piece)
        prompt = progress.prompt.scores()
        scored = ScoredTokens(
            [*prompt.token_ids, *piece.token_ids],
            [*prompt.logprobs, *piece.logprobs],
            [*prompt.tops, *piece.tops],
        )
        return self._writer.completion(scored, progress.offsets.of_prompt() + of_piece)

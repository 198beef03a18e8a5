"""The format of /v1/chat/completions: messages of the assistant, all to the same conversation."""

from typing_extensions import override

from control_plane.intake.answer_piece import AnswerPiece
from control_plane.intake.http_choice import ChoiceProgress
from control_plane.intake.http_format import AnswerFormat
from control_plane.intake.http_json import dump_long
from control_plane.intake.http_logprobs import ScoredTokens


class ChatFormat(AnswerFormat):
    """/v1/chat/completions. What is said of the prompt is said at the top level."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    @override
    def _opening(self, index: int, progress: ChoiceProgress) -> bytes:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        first = not any(each.begun for each in self._choices)
        if not (first and self._call.return_token_ids):
            return self._event(choice)
        opening = self._envelope | {"choices": [choice]} | self._prompt_ids()
        if self._call.include_usage:
            opening["usage"] = None
        return b"data: " + dump_long(opening) + b"\n\n"

    @override
    def _streamed_choice(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        return {"delta": {"content": piece.text} if piece.text else {}}

    @override
    def _whole_choice(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": piece.text}}

    @override
    def _logprobs(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        return self._writer.chat(ScoredTokens(piece.token_ids, piece.logprobs, piece.tops))

    @override
    def _prompt_fields(self) -> dict[str, object]:
        fields = self._prompt_ids() if self._call.return_token_ids else {}
        return fields | self._prompt_logprobs(self._choices[0])

    def _prompt_ids(self) -> dict[str, object]:
        return {"prompt_token_ids": self._choices[0].prompt.token_ids}

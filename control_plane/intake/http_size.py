"""How long writing an answer takes, roughly: so that what takes long is done in a thread."""

from control_plane.intake.answer_piece import AnswerPiece
from control_plane.intake.http_choice import ChoiceProgress
from control_plane.intake.http_schema import HttpCall

CHARACTERS_PER_ENTRY = 32


class AnswerSize:
    """Counts entries: a log-probability, a token id, or some characters of text."""

    def __init__(self, call: HttpCall) -> None:
        wanted = call.wanted
        self._echo_entries = 1 + (wanted.top_tokens or 0) if wanted.logprobs else 0
        self._token_entries = self._echo_entries + call.return_token_ids
        tops_count = wanted.prompt_top_tokens
        self._prompt_entries = call.return_token_ids + (0 if tops_count is None else 1 + tops_count)

    def of_piece(self, piece: AnswerPiece) -> int:
        """What came of a choice."""
        return len(piece.token_ids) * self._token_entries + _text_entries(piece.text)

    def of_prompt(self, progress: ChoiceProgress) -> int:
        """What a choice begins with."""
        entries = self._prompt_entries if progress.is_first else 0
        if progress.prompt_text is None:
            return len(progress.prompt.token_ids) * entries
        entries += self._echo_entries
        return len(progress.prompt.token_ids) * entries + _text_entries(progress.prompt_text)


def _text_entries(text: str) -> int:
    return len(text) // CHARACTERS_PER_ENTRY

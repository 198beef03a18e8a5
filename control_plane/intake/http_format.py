"""Answers in OpenAI's shapes: pieces as chunks of an event stream, or all of them as one object."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from control_plane.intake.admitted import Admitted, AdmittedChoice
from control_plane.intake.answer_piece import AnswerPiece, Usage
from control_plane.intake.http_choice import ChoiceProgress, joined
from control_plane.intake.http_json import dump
from control_plane.intake.http_logprobs import LogprobsWriter, ScoredTokens, TextOffsets
from control_plane.intake.http_schema import AnswerShape
from control_plane.intake.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class AnswerFormat(ABC):
    """One answer's format. `chunk` is called once a piece: all that is equal in it is made once.

    Either `chunk` for every piece in turn, or `whole` once. created: seconds since 1970.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        admitted: Admitted,
        shape: AnswerShape,
        model_name: str,
        created: int,
        tokenizer: Tokenizer,
    ) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._writer = LogprobsWriter(tokenizer, shape.top_logprobs)
        self._choices = [ChoiceProgress(choice) for choice in admitted.choices]
        self._envelope: dict[str, object] = {
            "id": admitted.request_id,
            "object": self.chunk_object,
            "created": created,
            "model": model_name,
        }
        self._head = b"data: " + dump(self._envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if shape.include_usage else b"]}\n\n"

    def chunk(self, piece: AnswerPiece) -> bytes:
        """The piece as events; empty if it has nothing the client wants to see yet."""
        progress = self._choices[piece.choice]
        progress.take(piece)
        if not self._is_shown(piece, progress):
            return b""
        opening = b"" if progress.begun else self._opening(piece.choice, progress)
        event = self._event(self._streamed_choice(piece, progress) | self._common(piece, progress))
        progress.begun = True
        return opening + event

    def last_chunks(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and the end mark."""
        if not self._shape.include_usage:
            return DONE
        closing = self._envelope | {"choices": [], "usage": usage_object(usage)}
        return b"data: " + dump(closing) + b"\n\n" + DONE

    def whole(self, pieces: Sequence[AnswerPiece]) -> bytes:
        """The complete answer as one object of JSON."""
        by_choice: list[list[AnswerPiece]] = [[] for _ in self._choices]
        for piece in pieces:
            by_choice[piece.choice].append(piece)
        choices = []
        for progress, its_pieces in zip(self._choices, by_choice, strict=True):
            piece = joined(its_pieces)
            progress.take(piece)
            choices.append(self._whole_choice(piece, progress) | self._common(piece, progress))
        answer = self._envelope | {"object": self.whole_object, "choices": choices}
        usage = pieces[-1].usage
        assert usage is not None, "the answer is not complete"
        answer["usage"] = usage_object(usage)
        return dump(answer | self._prompt_fields())

    def entries_count(self, pieces: Sequence[AnswerPiece]) -> int:
        """Log-probabilities that writing these pieces takes, roughly: a measure of the time."""
        if not self._shape.logprobs and self._shape.prompt_logprobs is None:
            return 0
        each = 1 + max(self._shape.top_logprobs, self._shape.prompt_logprobs or 0)
        tokens = sum(len(piece.logprobs) for piece in pieces)
        prompts = {piece.choice for piece in pieces if piece.prompt_deltas}
        return each * (tokens + sum(len(self._choices[i].request.prompt_ids) for i in prompts))

    # ---------------------------------------------------------------- what the endpoints differ in

    @abstractmethod
    def _opening(self, index: int, progress: ChoiceProgress) -> bytes:
        """What a choice begins with in a stream; may be empty."""

    @abstractmethod
    def _streamed_choice(
        self, piece: AnswerPiece, progress: ChoiceProgress
    ) -> dict[str, object]: ...

    @abstractmethod
    def _whole_choice(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]: ...

    @abstractmethod
    def _logprobs(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]: ...

    def _prompt_fields(self) -> dict[str, object]:
        """What a whole answer says about the prompt at its top level."""
        return {}

    def _is_shown(self, piece: AnswerPiece, progress: ChoiceProgress) -> bool:
        """Text, an end, or tokens if the client wants to see tokens."""
        del progress
        wants_tokens = self._shape.return_token_ids or self._shape.logprobs
        return bool(piece.text or piece.finish_reason or (wants_tokens and piece.token_ids))

    # ---------------------------------------------------------------- parts

    def _common(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        fields: dict[str, object] = {
            "index": piece.choice,
            "logprobs": self._logprobs(piece, progress) if self._shape.logprobs else None,
            "finish_reason": None if piece.finish_reason is None else piece.finish_reason.value,
        }
        if self._shape.return_token_ids:
            fields["token_ids"] = piece.token_ids
        return fields

    def _prompt_logprobs(self, progress: ChoiceProgress) -> dict[str, object]:
        if self._shape.prompt_logprobs is None:
            return {}
        writer = LogprobsWriter(self._tokenizer, self._shape.prompt_logprobs)
        return {"prompt_logprobs": writer.prompt(progress.scored_prompt())}

    def _event(self, choice: dict[str, object]) -> bytes:
        return self._head + dump(choice) + self._tail


class CompletionFormat(AnswerFormat):
    """/v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        admitted: Admitted,
        shape: AnswerShape,
        model_name: str,
        created: int,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(admitted, shape, model_name, created, tokenizer)
        self._offsets = [_offsets(tokenizer, choice) for choice in admitted.choices]

    @override
    def _opening(self, index: int, progress: ChoiceProgress) -> bytes:
        return b""

    @override
    def _is_shown(self, piece: AnswerPiece, progress: ChoiceProgress) -> bool:
        if self._shape.echo and not progress.begun:
            return not progress.prompt_due
        return super()._is_shown(piece, progress)

    @override
    def _streamed_choice(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        text = piece.text if progress.begun else progress.prompt_text + piece.text
        fields: dict[str, object] = {"text": text}
        if self._shape.return_token_ids and not progress.begun:
            fields["prompt_token_ids"] = progress.request.prompt_ids
        return fields

    @override
    def _whole_choice(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        return self._streamed_choice(piece, progress) | self._prompt_logprobs(progress)

    @override
    def _logprobs(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        offsets = self._offsets[piece.choice]
        of_piece = offsets.of(piece.token_ids)
        if progress.begun or not self._shape.echo:
            scored = ScoredTokens(piece.token_ids, piece.logprobs, piece.tops)
            return self._writer.completion(scored, of_piece)
        prompt = progress.scored_prompt()
        scored = ScoredTokens(
            [*prompt.token_ids, *piece.token_ids],
            [*prompt.logprobs, *piece.logprobs],
            [*prompt.tops, *piece.tops],
        )
        return self._writer.completion(scored, offsets.of_prompt() + of_piece)


class ChatFormat(AnswerFormat):
    """/v1/chat/completions."""

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
        if not (first and self._shape.return_token_ids):
            return self._event(choice)
        opening = self._envelope | {"choices": [choice]} | self._prompt_ids()
        if self._shape.include_usage:
            opening["usage"] = None
        return b"data: " + dump(opening) + b"\n\n"

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
        fields = self._prompt_ids() if self._shape.return_token_ids else {}
        return fields | self._prompt_logprobs(self._choices[0])

    def _prompt_ids(self) -> dict[str, object]:
        return {"prompt_token_ids": self._choices[0].request.prompt_ids}


def _offsets(tokenizer: Tokenizer, choice: AdmittedChoice) -> TextOffsets:
    return TextOffsets(tokenizer, choice.request.prompt_ids, choice.prompt_text or "")


def usage_object(usage: Usage) -> dict[str, object]:
    """Usage in OpenAI's shape, with our own facts under `polychip`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "polychip": {
            "group": usage.group_id,
            "failovers": usage.failovers,
            "retractions": usage.retractions,
            "seed": usage.seed,
        },
    }

"""Answers in OpenAI's shapes: pieces as chunks of an event stream, or all of them as one object."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from control_plane.intake.answer import AnswerPiece, Usage
from control_plane.intake.detokenizer import Detokenizer
from control_plane.intake.http_json import dump, finite
from control_plane.intake.tokenizer import Tokenizer
from control_plane.request import Request

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """What the client asked of the shape; created: seconds since 1970."""

    model_name: str
    created: int
    include_usage: bool = False
    return_token_ids: bool = False


class AnswerFormat(ABC):
    """One answer's format. `chunk` is called once a piece: all that is equal in it is made once."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request: Request, options: FormatOptions, tokenizer: Tokenizer) -> None:
        self._request = request
        self._options = options
        self._tokenizer = tokenizer
        self._envelope = {
            "id": request.request_id,
            "object": self.chunk_object,
            "created": options.created,
            "model": options.model_name,
        }
        self._head = b"data: " + dump(self._envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"

    @abstractmethod
    def first_chunk(self) -> bytes:
        """What the stream begins with; may be empty."""

    def chunk(self, piece: AnswerPiece) -> bytes:
        """The piece as an event; empty if it has nothing the client wants to see yet."""
        wanted = self._options.return_token_ids or self._request.wants_logprobs
        if not (piece.text or piece.finish_reason or (wanted and piece.token_ids)):
            return b""
        return self._event(self._streamed_choice(piece) | self._common(piece))

    def last_chunks(self, usage: Usage | None) -> bytes:
        """The usage, if it was asked for, and the end mark."""
        if usage is None or not self._options.include_usage:
            return DONE
        closing = self._envelope | {"choices": [], "usage": usage_object(usage)}
        return b"data: " + dump(closing) + b"\n\n" + DONE

    def whole(self, pieces: Sequence[AnswerPiece]) -> dict[str, object]:
        """The complete answer as one object."""
        last = pieces[-1]
        piece = AnswerPiece(
            first_index=pieces[0].first_index,
            token_ids=tuple(each for part in pieces for each in part.token_ids),
            text="".join(part.text for part in pieces),
            logprobs=tuple(each for part in pieces for each in part.logprobs),
            finish_reason=last.finish_reason,
            usage=last.usage,
        )
        answer: dict[str, object] = self._envelope | {
            "object": self.whole_object,
            "choices": [self._whole_choice(piece) | self._common(piece)],
        }
        if piece.usage is not None:
            answer["usage"] = usage_object(piece.usage)
        return answer

    @abstractmethod
    def _streamed_choice(self, piece: AnswerPiece) -> dict[str, object]: ...

    @abstractmethod
    def _whole_choice(self, piece: AnswerPiece) -> dict[str, object]: ...

    @abstractmethod
    def _logprobs(self, piece: AnswerPiece) -> dict[str, object]: ...

    def _common(self, piece: AnswerPiece) -> dict[str, object]:
        fields: dict[str, object] = {
            "index": 0,
            "logprobs": self._logprobs(piece) if self._request.wants_logprobs else None,
            "finish_reason": None if piece.finish_reason is None else piece.finish_reason.value,
        }
        if self._options.return_token_ids:
            fields["token_ids"] = piece.token_ids
        return fields

    def _event(self, choice: dict[str, object]) -> bytes:
        return self._head + dump(choice) + self._tail

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")


class CompletionFormat(AnswerFormat):
    """/v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, request: Request, options: FormatOptions, tokenizer: Tokenizer) -> None:
        super().__init__(request, options, tokenizer)
        self._prompt_ids_due = options.return_token_ids
        self._offsets = Detokenizer(tokenizer)
        self._offset = 0

    @override
    def first_chunk(self) -> bytes:
        return b""

    @override
    def _streamed_choice(self, piece: AnswerPiece) -> dict[str, object]:
        return self._whole_choice(piece)

    @override
    def _whole_choice(self, piece: AnswerPiece) -> dict[str, object]:
        if not self._prompt_ids_due:
            return {"text": piece.text}
        self._prompt_ids_due = False  # once, also in a stream
        return {"text": piece.text, "prompt_token_ids": self._request.prompt_ids}

    @override
    def _logprobs(self, piece: AnswerPiece) -> dict[str, object]:
        offsets = []
        for token_id in piece.token_ids:
            offsets.append(self._offset)
            self._offset += len(self._offsets.feed(token_id))
        return {
            "tokens": list(map(self._token_text, piece.token_ids)),
            "token_logprobs": list(map(finite, piece.logprobs)),
            "top_logprobs": None,
            "text_offset": offsets,
        }


class ChatFormat(AnswerFormat):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    @override
    def first_chunk(self) -> bytes:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if not self._options.return_token_ids:
            return self._event(choice)
        opening: dict[str, object] = self._envelope | {
            "choices": [choice],
            "prompt_token_ids": self._request.prompt_ids,
        }
        if self._options.include_usage:
            opening["usage"] = None
        return b"data: " + dump(opening) + b"\n\n"

    @override
    def whole(self, pieces: Sequence[AnswerPiece]) -> dict[str, object]:
        answer = super().whole(pieces)
        if self._options.return_token_ids:
            answer["prompt_token_ids"] = self._request.prompt_ids
        return answer

    @override
    def _streamed_choice(self, piece: AnswerPiece) -> dict[str, object]:
        return {"delta": {"content": piece.text} if piece.text else {}}

    @override
    def _whole_choice(self, piece: AnswerPiece) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": piece.text}}

    @override
    def _logprobs(self, piece: AnswerPiece) -> dict[str, object]:
        return {
            "content": [
                {
                    "token": self._token_text(token_id),
                    "logprob": finite(logprob),
                    "bytes": list(self._tokenizer.token_bytes(token_id)),
                    "top_logprobs": [],
                }
                for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True)
            ]
        }


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

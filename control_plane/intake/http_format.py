"""Answers in OpenAI's shapes: pieces as chunks of an event stream, or all of them as one object."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from control_plane.intake.admitted import Admitted
from control_plane.intake.answer_piece import AnswerPiece, Usage
from control_plane.intake.http_choice import ChoiceProgress, joined, progress_of
from control_plane.intake.http_json import dump, dump_long
from control_plane.intake.http_logprobs import LogprobsWriter
from control_plane.intake.http_schema import HttpCall
from control_plane.intake.http_size import AnswerSize
from control_plane.intake.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class AnswerFormat(ABC):
    """One answer's format. All that is equal in its chunks is made once.

    A stream: `ready` for every piece in turn, and `chunk` for what it returns. A whole answer:
    `gather` for every piece, and `whole` once. Sizes are entries as AnswerSize counts them.
    created: seconds since 1970. call: its prompts are not needed.
    """

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        admitted: Admitted,
        call: HttpCall,
        model_name: str,
        created: int,
        tokenizer: Tokenizer,
    ) -> None:
        wanted = call.wanted
        self._call = call
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._writer = LogprobsWriter(tokenizer, wanted.top_tokens or 0)
        self._choices = progress_of(admitted.choices, tokenizer)
        self._size = AnswerSize(call)
        self._gathered: list[list[AnswerPiece]] = [[] for _ in self._choices]
        self._gathered_size = sum(map(self._size.of_prompt, self._choices))
        self._usage: Usage | None = None
        self._envelope: dict[str, object] = {
            "id": admitted.request_id,
            "object": self.chunk_object,
            "created": created,
            "model": model_name,
        }
        self._head = b"data: " + dump(self._envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"

    # ---------------------------------------------------------------- a stream

    def ready(self, piece: AnswerPiece) -> Sequence[AnswerPiece]:
        """What can be written now that the piece came."""
        return self._choices[piece.choice].prompt.ready(piece)

    def chunk_size(self, piece: AnswerPiece) -> int:
        """Of its chunk."""
        progress = self._choices[piece.choice]
        prompt_size = 0 if progress.begun else self._size.of_prompt(progress)
        return prompt_size + self._size.of_piece(piece)

    def chunk(self, piece: AnswerPiece) -> bytes:
        """The piece as events; empty if it has nothing the client wants to see."""
        progress = self._choices[piece.choice]
        if not self._is_shown(piece, progress):
            return b""
        opening = b"" if progress.begun else self._opening(piece.choice, progress)
        event = self._event(self._streamed_choice(piece, progress) | self._common(piece, progress))
        progress.begun = True
        return opening + event

    def last_chunks(self, usage: Usage) -> bytes:
        """The usage, if it was asked for, and the end mark."""
        if not self._call.include_usage:
            return DONE
        closing = self._envelope | {"choices": [], "usage": usage_object(usage)}
        return b"data: " + dump(closing) + b"\n\n" + DONE

    # ---------------------------------------------------------------- a whole answer

    def gather(self, piece: AnswerPiece) -> None:
        """Keeps a piece for `whole`."""
        self._choices[piece.choice].prompt.take(piece.prompt_deltas)
        self._gathered[piece.choice].append(piece)
        self._gathered_size += self._size.of_piece(piece)
        self._usage = piece.usage

    @property
    def whole_size(self) -> int:
        """Of what was gathered."""
        return self._gathered_size

    def whole(self) -> Iterator[bytes]:
        """The complete answer as one object of JSON, in parts: each has at most one choice."""
        assert self._usage is not None, "the answer is not complete"
        yield dump(self._envelope | {"object": self.whole_object})[:-1] + b',"choices":['
        for index, progress in enumerate(self._choices):
            piece = joined(self._gathered[index])
            choice = self._whole_choice(piece, progress) | self._common(piece, progress)
            yield (b"," if index else b"") + dump_long(choice)
        closing = {"usage": usage_object(self._usage)} | self._prompt_fields()
        yield b"]," + dump_long(closing)[1:]

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

    # ---------------------------------------------------------------- parts

    def _is_shown(self, piece: AnswerPiece, progress: ChoiceProgress) -> bool:
        """An echo, text, an end, or tokens if the client wants to see tokens."""
        wants_tokens = self._call.return_token_ids or self._wanted.logprobs
        return bool(
            (progress.prompt_text is not None and not progress.begun)
            or piece.text
            or piece.finish_reason
            or (wants_tokens and piece.token_ids)
        )

    def _common(self, piece: AnswerPiece, progress: ChoiceProgress) -> dict[str, object]:
        fields: dict[str, object] = {
            "index": piece.choice,
            "logprobs": self._logprobs(piece, progress) if self._wanted.logprobs else None,
            "finish_reason": None if piece.finish_reason is None else piece.finish_reason.value,
        }
        if self._call.return_token_ids:
            fields["token_ids"] = piece.token_ids
        return fields

    def _prompt_logprobs(self, progress: ChoiceProgress) -> dict[str, object]:
        tops_count = self._wanted.prompt_top_tokens
        if tops_count is None:
            return {}
        writer = LogprobsWriter(self._tokenizer, tops_count)
        return {"prompt_logprobs": writer.prompt(progress.prompt.scores())}

    def _event(self, choice: dict[str, object]) -> bytes:
        return self._head + dump_long(choice) + self._tail


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

"""Between the messages of InferenceService and intake's records."""

from collections.abc import Iterator
from typing import Any

from control_plane.errors import InvalidRequest
from control_plane.intake.admitted import Admitted
from control_plane.intake.answer_piece import AnswerPiece, Usage
from control_plane.intake.generation_input import (
    SHARED_FIELDS,
    ChatPrompt,
    GenerationInput,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from control_plane.intake.model_card import ModelCard
from control_plane.intake.prompt_reader import no_room_for_output
from control_plane.request import FinishReason
from control_plane.scheduling.messages import PromptDelta, TopTokens
from protos import inference_pb2

PROTOCOL = "grpc"
"""What the metrics call it."""

SAMPLING_FIELDS = {**SHARED_FIELDS, "top_logprobs": "top_tokens"}
"""Optional fields of the message, and what intake calls them."""

LIST_LENGTH_ALWAYS_READ = 4096
"""A list no longer than this, or than the context, is read whole, and left to admission."""
TOKEN_BYTES_MAX = 5
CHARACTER_BYTES_MAX = 4
LOGPROB_BYTES = 4
TOP_TOKENS_BYTES_MAX = 16
"""Of the message around the likeliest tokens at one place."""

FINISH_REASONS = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def generation_input(
    message: inference_pb2.GenerateRequest, deadline: float | None, context_tokens: int
) -> GenerationInput:
    """The call as intake sees it, not checked yet; deadline: in the core's clock.

    Raises InvalidRequest for a list far too long, before millions of objects are made of it.
    """
    _check_lists(message, context_tokens)
    sampling = message.sampling
    present: dict[str, Any] = {
        known_as: getattr(sampling, name)
        for name, known_as in SAMPLING_FIELDS.items()
        if sampling.HasField(name)
    }
    return GenerationInput(
        prompts=_prompts(message),
        model=message.model,
        logit_bias=dict(sampling.logit_bias),
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        resume_output_ids=tuple(tuple(each.ids) for each in message.resume_output_ids),
        priority=message.priority if message.HasField("priority") else None,
        cache_salt=message.cache_salt,
        deadline=deadline,
        reserved={"adapter": message.adapter} if message.HasField("adapter") else {},
        **present,
    )


def check_prompt_length(ids_count: int, context_tokens: int) -> None:
    """Raises InvalidRequest for so many ids that not even admission should look at them."""
    if ids_count > max(context_tokens, LIST_LENGTH_ALWAYS_READ):
        raise no_room_for_output("prompt", ids_count, context_tokens)


def _check_lists(message: inference_pb2.GenerateRequest, context_tokens: int) -> None:
    check_prompt_length(len(message.prompt_ids.ids), context_tokens)
    count_max = max(context_tokens, LIST_LENGTH_ALWAYS_READ)
    sampling, resumed = message.sampling, message.resume_output_ids
    counts = {
        "messages": len(message.chat.messages),
        "stop_token_ids": len(sampling.stop_token_ids),
        "stop": len(sampling.stop),
        "logit_bias": len(sampling.logit_bias),
        "resume_output_ids": max(map(len, (resumed, *(each.ids for each in resumed[:count_max])))),
    }
    for name, count in counts.items():
        if count > count_max:
            raise InvalidRequest(
                f"{name}: {count} entries are more than any request may have ({count_max}); send "
                "fewer",
                field=name,
            )


def _prompts(message: inference_pb2.GenerateRequest) -> tuple[Prompt, ...]:
    match message.WhichOneof("input"):
        case "prompt":
            return (TextPrompt(message.prompt),)
        case "prompt_ids":
            return (TokenPrompt(tuple(message.prompt_ids.ids)),)
        case "chat":
            messages = message.chat.messages
            return (ChatPrompt(tuple({"role": m.role, "content": m.content} for m in messages)),)
        case _:
            return ()


def generate_responses(
    piece: AnswerPiece, first_of: Admitted | None, message_bytes_max: int
) -> list[inference_pb2.GenerateResponse]:
    """A piece as messages, none of which is too large; one, unless lists in it are very long.

    first_of: the call, for the first piece of all: its identity, seed and prompt go along.
    """
    # The first message of all may carry a list of each kind.
    list_bytes_max = message_bytes_max // 4
    messages = [
        inference_pb2.GenerateResponse(choice=piece.choice, prompt_logprobs=scores)
        for delta in piece.prompt_deltas
        for scores in _prompt_logprobs(delta, list_bytes_max)
    ]
    if piece.token_ids or piece.text or piece.finish_reason or not messages:
        messages += _token_responses(piece, list_bytes_max)
    if first_of is None:
        return messages
    *leading, last = _parts(
        first_of.choices[0].request.prompt_ids, list_bytes_max // TOKEN_BYTES_MAX
    )
    messages[0].prompt_ids.extend(last)
    messages[:0] = [inference_pb2.GenerateResponse(prompt_ids=part) for part in leading]
    messages[0].request_id = first_of.request_id
    messages[0].seed = first_of.seed
    return messages


def _token_responses(
    piece: AnswerPiece, bytes_max: int
) -> Iterator[inference_pb2.GenerateResponse]:
    """The tokens of a reader that fell far behind may need several, each with its tokens' text."""
    for part in _token_parts(piece, bytes_max):
        message = inference_pb2.GenerateResponse(
            choice=piece.choice,
            first_index=piece.first_index + part.start,
            token_ids=piece.token_ids[part],
            text="".join(piece.texts[part]) if piece.token_ids else piece.text,
            logprobs=piece.logprobs[part],
            top_tokens=map(_top_tokens, piece.tops[part]),
        )
        if part.stop == len(piece.token_ids):
            message.finish_reason = FINISH_REASONS[piece.finish_reason]
            if piece.usage is not None:
                message.usage.CopyFrom(_usage(piece.usage))
        yield message


def _token_parts(piece: AnswerPiece, bytes_max: int) -> Iterator[slice]:
    """Runs of its tokens whose lists and whose text are not too large; one at least."""
    count_max, characters_max = _places_max(piece.tops, bytes_max), bytes_max // CHARACTER_BYTES_MAX
    start = characters = 0
    for index, text in enumerate(piece.texts):
        characters += len(text)
        if index > start and (index - start == count_max or characters > characters_max):
            yield slice(start, index)
            start, characters = index, len(text)
    yield slice(start, len(piece.token_ids))


def _prompt_logprobs(delta: PromptDelta, bytes_max: int) -> Iterator[inference_pb2.PromptLogprobs]:
    """The scores, as many in each message as fit."""
    scores = delta.scores
    count = _places_max(scores.tops, bytes_max)
    for start in range(0, len(scores.logprobs), count):
        part = slice(start, start + count)
        yield inference_pb2.PromptLogprobs(
            first_index=delta.first_index + start,
            logprobs=scores.logprobs[part],
            top_tokens=map(_top_tokens, scores.tops[part]),
        )


def _places_max(tops: tuple[TopTokens, ...], bytes_max: int) -> int:
    """How many tokens with a log-probability and the likeliest at their places so many bytes hold;
    one at least."""
    listed_count = max((len(top.token_ids) for top in tops), default=0)
    place_bytes = (1 + listed_count) * (TOKEN_BYTES_MAX + LOGPROB_BYTES)
    return max(1, bytes_max // (place_bytes + (TOP_TOKENS_BYTES_MAX if tops else 0)))


def _top_tokens(top: TopTokens) -> inference_pb2.TopTokens:
    return inference_pb2.TopTokens(ids=top.token_ids, logprobs=top.logprobs)


def _parts(ids: tuple[int, ...], count_max: int) -> list[tuple[int, ...]]:
    count_max = max(1, count_max)
    return [ids[start : start + count_max] for start in range(0, len(ids), count_max)]


def _usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        group=usage.group_id,
        failovers=usage.failovers,
        retractions=usage.retractions,
        seed=usage.seed,
    )


def model_info(card: ModelCard, version: str) -> inference_pb2.GetModelInfoResponse:
    """The card as a message."""
    return inference_pb2.GetModelInfoResponse(
        names=card.names,
        architecture=card.architecture,
        context_tokens=card.context_tokens,
        vocabulary_size=card.vocabulary_size,
        end_token_ids=card.end_token_ids,
        has_chat_template=card.has_chat_template,
        version=version,
    )

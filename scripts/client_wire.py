"""Between the client library's records and the messages; remembers what of an answer came."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace

from google.protobuf.message import Message as ProtobufMessage

from protos import admin_pb2, inference_pb2
from scripts.generation import Generation, Message, Piece, PromptLogprobs, TopTokens, Usage

_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


class ResumableAnswer:
    """One answer over any number of calls: the request of the next one, the pieces not seen yet.

    started: the service has begun to answer, so that the next call goes on where this one stopped.
    progress_count: pieces that brought something new.
    """

    def __init__(self, generation: Generation) -> None:
        self.started = False
        self.progress_count = 0
        self._request = _request(generation)
        self._choices = [_Received() for _ in range(generation.n or 1)]
        self._prompt_ids_count = 0
        self._prompt_ids_index = 0

    def next_request(self) -> inference_pb2.GenerateRequest:
        """The request of the next call; it names the output tokens that have come."""
        self._prompt_ids_index = 0
        if self.started:
            # The service may still hold the old request under its old name.
            self._request.request_id = f"resumed-{secrets.token_hex(8)}"
            self._request.ClearField("resume_output_ids")
            for received in self._choices:
                self._request.resume_output_ids.add(ids=received.token_ids)
        return self._request

    def take(self, response: inference_pb2.GenerateResponse) -> Piece | None:
        """The piece in a message; None if nothing of it is new."""
        self.started = True
        if response.HasField("seed"):
            # If the service drew it: what is resumed must go on with the same draws.
            self._request.sampling.seed = response.seed
        piece = replace(_piece(response), prompt_ids=self._new_prompt_ids(response.prompt_ids))
        new = self._choices[response.choice].new_of(piece)
        self.progress_count += new is not None
        return new

    def _new_prompt_ids(self, ids: Sequence[int]) -> tuple[int, ...]:
        skipped_count = max(0, self._prompt_ids_count - self._prompt_ids_index)
        self._prompt_ids_index += len(ids)
        self._prompt_ids_count = max(self._prompt_ids_count, self._prompt_ids_index)
        return tuple(ids[skipped_count:])


class _Received:
    """What has come of one choice."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._scores_end_index = 0
        self._finished = False

    def new_of(self, piece: Piece) -> Piece | None:
        """The piece without what a resumed call repeats: an end, scores of the prompt."""
        scores = self._new_scores(piece.prompt_logprobs)
        reason = None if self._finished else piece.finish_reason
        self.token_ids.extend(piece.token_ids)
        self._finished = self._finished or reason is not None
        news = (piece.token_ids, piece.text, piece.prompt_ids, scores, reason, piece.usage)
        return replace(piece, prompt_logprobs=scores, finish_reason=reason) if any(news) else None

    def _new_scores(self, scores: PromptLogprobs | None) -> PromptLogprobs | None:
        if scores is None:
            return None
        skipped_count = max(0, self._scores_end_index - scores.first_index)
        if skipped_count >= len(scores.logprobs):
            return None
        self._scores_end_index = scores.first_index + len(scores.logprobs)
        return PromptLogprobs(
            first_index=scores.first_index + skipped_count,
            logprobs=scores.logprobs[skipped_count:],
            top_tokens=scores.top_tokens[skipped_count:],
        )


def _request(generation: Generation) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        request_id=generation.request_id,
        model=generation.model,
        sampling=_sampling(generation),
        priority=generation.priority,
        cache_salt=generation.cache_salt,
    )
    if isinstance(generation.prompt, str):
        request.prompt = generation.prompt
        return request
    messages = [part for part in generation.prompt if isinstance(part, Message)]
    if messages:
        for message in messages:
            request.chat.messages.add(role=message.role, content=message.content)
    else:
        request.prompt_ids.ids.extend(part for part in generation.prompt if isinstance(part, int))
        request.prompt_ids.SetInParent()
    return request


def _sampling(generation: Generation) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(
        temperature=generation.temperature,
        seed=generation.seed,
        max_tokens=generation.max_tokens,
        stop_token_ids=generation.stop_token_ids,
        ignore_eos=generation.ignore_eos,
        logprobs=generation.logprobs,
        top_k=generation.top_k,
        top_p=generation.top_p,
        min_p=generation.min_p,
        presence_penalty=generation.presence_penalty,
        frequency_penalty=generation.frequency_penalty,
        repetition_penalty=generation.repetition_penalty,
        logit_bias=generation.logit_bias,
        stop=generation.stop,
        min_tokens=generation.min_tokens,
        n=generation.n,
        top_logprobs=generation.top_logprobs,
        prompt_logprobs=generation.prompt_logprobs,
    )


def _piece(response: inference_pb2.GenerateResponse) -> Piece:
    usage = None
    if response.HasField("usage"):
        names = Usage.__dataclass_fields__
        usage = Usage(**{name: getattr(response.usage, name) for name in names})
    return Piece(
        first_index=response.first_index,
        token_ids=tuple(response.token_ids),
        text=response.text,
        logprobs=tuple(response.logprobs),
        prompt_ids=tuple(response.prompt_ids),
        finish_reason=_FINISH_REASONS.get(response.finish_reason),
        usage=usage,
        choice=response.choice,
        top_tokens=_top_tokens(response.top_tokens),
        prompt_logprobs=_prompt_logprobs(response),
    )


def _prompt_logprobs(response: inference_pb2.GenerateResponse) -> PromptLogprobs | None:
    if not response.HasField("prompt_logprobs"):
        return None
    scores = response.prompt_logprobs
    return PromptLogprobs(
        first_index=scores.first_index,
        logprobs=tuple(scores.logprobs),
        top_tokens=_top_tokens(scores.top_tokens),
    )


def _top_tokens(lists: Iterable[inference_pb2.TopTokens]) -> tuple[TopTokens, ...]:
    return tuple(TopTokens(ids=tuple(each.ids), logprobs=tuple(each.logprobs)) for each in lists)


def fields_of(message: ProtobufMessage) -> dict[str, object]:
    """Every field of a flat message, present or not, under its own name."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def model_info_of(response: inference_pb2.GetModelInfoResponse) -> dict[str, object]:
    """The model's description as plain values."""
    lists = {"names": list(response.names), "end_token_ids": list(response.end_token_ids)}
    return {**fields_of(response), **lists}


def status_of(response: admin_pb2.GetStatusResponse) -> dict[str, object]:
    """The status as plain values."""
    return {
        "version": response.version,
        "term": response.term,
        "workers": [fields_of(worker) for worker in response.workers],
        "groups": [
            {**fields_of(group), "ranks": list(group.ranks), "blocks": fields_of(group.blocks)}
            for group in response.groups
        ],
        "frontends": [fields_of(frontend) for frontend in response.frontends],
        "requests": fields_of(response.requests),
        "generated_tokens": response.generated_tokens,
        "failovers": response.failovers,
    }

"""Conversion between records of the core and the messages of protos/frontend.proto.

    frontend  --event_message-->   FromFrontend  --event_of-->   control plane
    frontend  <--effect_of--       ToFrontend    <--effect_message--  control plane

Both sides are of one installation, so decoders trust shapes; what is no message at all raises
DecodeError.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from control_plane.config import ControlPlaneConfig, SchedulingConfig
from control_plane.errors import REQUEST_ERRORS, RequestError
from control_plane.request import Request, Sampling
from control_plane.scheduling.messages import (
    Accepted,
    CacheFlushed,
    Cancel,
    Condemn,
    End,
    FlushCache,
    PromptDelta,
    PromptScores,
    RequestFacts,
    ServingChanged,
    Submit,
    TokenDelta,
    Tokens,
    TopTokens,
)
from protos import frontend_pb2

FrontEvent = Submit | Cancel | End | FlushCache

_ERRORS = {kind.reason: kind for kind in REQUEST_ERRORS}


@dataclass(slots=True)
class Choice:
    """What tokens of a request are told by, and the facts told last; either side keeps its own."""

    number: int
    request_id: str
    facts: RequestFacts = field(default_factory=RequestFacts)


# ---------------------------------------------------------------- the configuration


def start_message(config: ControlPlaneConfig) -> bytes:
    """The first message to a frontend: all its settings."""
    start = frontend_pb2.Start(config_json=json.dumps(asdict(config)))
    return frontend_pb2.ToFrontend(start=start).SerializeToString()


def config_of(start: frontend_pb2.Start) -> ControlPlaneConfig:
    """The settings in it."""
    values = json.loads(start.config_json)
    scheduling = SchedulingConfig(**_with_tuples(values.pop("scheduling")))
    return ControlPlaneConfig(scheduling=scheduling, **_with_tuples(values))


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


# ---------------------------------------------------------------- events


def event_message(event: Cancel | End | FlushCache) -> frontend_pb2.FromFrontend:
    """An event that says nothing but what its record holds."""
    match event:
        case Cancel(request_id=request_id, reason=reason):
            cancel = frontend_pb2.CancelRequest(request_id=request_id, reason=printable(reason))
            return frontend_pb2.FromFrontend(cancel=cancel)
        case End(request_id=request_id, output_count=count):
            end = frontend_pb2.EndRequest(request_id=request_id, output_count=count)
            return frontend_pb2.FromFrontend(end=end)
        case FlushCache():
            return frontend_pb2.FromFrontend(flush_cache=frontend_pb2.FlushCache())


def opened_message(request_id: str, number: int) -> frontend_pb2.FromFrontend:
    """A client's call arrived; a refusal names the number."""
    opened = frontend_pb2.CallOpened(request_id=request_id, number=number)
    return frontend_pb2.FromFrontend(call_opened=opened)


def submit_message(request: Request, number: int, call_id: str) -> frontend_pb2.FromFrontend:
    """A choice of a call, and the number its tokens will be told by."""
    sampling = request.sampling
    submit = frontend_pb2.SubmitRequest(
        number=number,
        call_id=call_id,
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        sampling=frontend_pb2.Sampling(
            temperature=sampling.temperature,
            seed=sampling.seed,
            choice=sampling.choice,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            bias_token_id=[token_id for token_id, _ in sampling.logit_bias],
            bias=[bias for _, bias in sampling.logit_bias],
            suppressed_ids=sampling.suppressed_ids,
            min_tokens=sampling.min_tokens,
        ),
        max_tokens=request.max_tokens,
        output_ids=request.output_ids,
        priority=request.priority,
        deadline=request.deadline,
        model=request.model,
        adapter=request.adapter,
        salt=request.salt.encode(errors="surrogatepass"),
        wants_logprobs=request.wants_logprobs,
        top_tokens=request.top_tokens,
        prompt_top_tokens=request.prompt_top_tokens,
        wants_logits=request.wants_logits,
        use_prefix_cache=request.use_prefix_cache,
        target_group=request.target_group,
    )
    return frontend_pb2.FromFrontend(submit=submit)


def submit_of(message: frontend_pb2.SubmitRequest) -> Submit:
    """The request in it."""
    sampling = message.sampling
    request = Request(
        request_id=message.request_id,
        prompt_ids=tuple(message.prompt_ids),
        sampling=Sampling(
            temperature=sampling.temperature,
            seed=sampling.seed,
            choice=sampling.choice,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=tuple(zip(sampling.bias_token_id, sampling.bias, strict=True)),
            suppressed_ids=tuple(sampling.suppressed_ids),
            min_tokens=sampling.min_tokens,
        ),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        output_ids=tuple(message.output_ids),
        priority=message.priority,
        deadline=message.deadline if message.HasField("deadline") else None,
        model=message.model,
        adapter=message.adapter,
        salt=message.salt.decode(errors="surrogatepass"),
        wants_logprobs=message.wants_logprobs,
        top_tokens=message.top_tokens,
        prompt_top_tokens=(
            message.prompt_top_tokens if message.HasField("prompt_top_tokens") else None
        ),
        wants_logits=message.wants_logits,
        use_prefix_cache=message.use_prefix_cache,
        target_group=message.target_group if message.HasField("target_group") else None,
    )
    return Submit(request)


# ---------------------------------------------------------------- effects


def accepted_message(number: int, effect: Accepted) -> frontend_pb2.ToFrontend:
    """The choice of this number is queued."""
    accepted = frontend_pb2.RequestAccepted(number=number, tokens_max=effect.tokens_max)
    return frontend_pb2.ToFrontend(accepted=accepted)


def failed_message(number: int, error: RequestError) -> frontend_pb2.ToFrontend:
    """The choice of this number is over."""
    failed = frontend_pb2.RequestFailed(number=number, failure=failure_of(error))
    return frontend_pb2.ToFrontend(failed=failed)


def effect_message(effect: CacheFlushed | ServingChanged) -> frontend_pb2.ToFrontend:
    """An effect that is about no request."""
    match effect:
        case CacheFlushed(blocks_freed=blocks_freed):
            flushed = frontend_pb2.CacheFlushed(blocks_freed=blocks_freed)
            return frontend_pb2.ToFrontend(cache_flushed=flushed)
        case ServingChanged(group_ids=group_ids):
            changed = frontend_pb2.ServingChanged(group_ids=group_ids)
            return frontend_pb2.ToFrontend(serving_changed=changed)


def failure_of(error: RequestError) -> frontend_pb2.Failure:
    """An error of one request."""
    return frontend_pb2.Failure(
        reason=error.reason,
        message=printable(error.message),
        field=error.field,
        retry_after_s=error.retry_after_s,
    )


def error_of(failure: frontend_pb2.Failure) -> RequestError:
    """The error in it."""
    return _ERRORS[failure.reason](
        failure.message,
        field=failure.field if failure.HasField("field") else None,
        retry_after_s=failure.retry_after_s if failure.HasField("retry_after_s") else None,
    )


def tokens_message(
    rows: Sequence[tuple[Choice, TokenDelta]], prompts: Iterable[tuple[Choice, PromptDelta]]
) -> frontend_pb2.ToFrontend:
    """Tokens of one step for one frontend. Notes in each choice which facts were told."""
    facts = []
    scores = []
    for row, (choice, delta) in enumerate(rows):
        if delta.facts is not choice.facts and delta.facts != choice.facts:
            choice.facts = delta.facts
            facts.append(frontend_pb2.ChoiceFacts(number=choice.number, **asdict(delta.facts)))
        if delta.logprobs or delta.tops or delta.logits is not None:
            scores.append(
                frontend_pb2.RowScores(
                    row=row,
                    logprobs=delta.logprobs,
                    tops=_top_lists(delta.tops),
                    logits=delta.logits,
                )
            )
    tokens = frontend_pb2.StepTokens(
        number=[choice.number for choice, _ in rows],
        first_index=[delta.first_index for _, delta in rows],
        token_count=[len(delta.token_ids) for _, delta in rows],
        token_ids=[token_id for _, delta in rows for token_id in delta.token_ids],
        facts=facts,
        scores=scores,
        prompt_scores=[
            frontend_pb2.PromptScores(
                number=choice.number,
                first_index=delta.first_index,
                logprobs=delta.scores.logprobs,
                tops=_top_lists(delta.scores.tops),
            )
            for choice, delta in prompts
        ],
    )
    return frontend_pb2.ToFrontend(tokens=tokens)


def tokens_of(message: frontend_pb2.StepTokens, choices: Mapping[int, Choice]) -> Tokens:
    """Tokens of those choices that are still known; notes the facts told of each."""
    for told in message.facts:
        if (choice := choices.get(told.number)) is not None:
            choice.facts = RequestFacts(
                group_id=told.group_id,
                cached_tokens=told.cached_tokens,
                failovers=told.failovers,
                retractions=told.retractions,
                queue_s=told.queue_s,
            )
    scores = {each.row: each for each in message.scores}
    token_ids = tuple(message.token_ids)
    deltas = []
    start = 0
    columns = zip(message.number, message.first_index, message.token_count, strict=True)
    for row, (number, first_index, count) in enumerate(columns):
        end = start + count
        if (choice := choices.get(number)) is not None:
            ids = token_ids[start:end]
            delta = TokenDelta(choice.request_id, first_index, ids, (), choice.facts)
            deltas.append(_with_scores(delta, scores[row]) if row in scores else delta)
        start = end
    return Tokens(tuple(deltas), tuple(_prompt_deltas(message, choices)))


def _with_scores(delta: TokenDelta, scores: frontend_pb2.RowScores) -> TokenDelta:
    return delta._replace(
        logprobs=tuple(scores.logprobs),
        tops=_tops(scores.tops),
        logits=scores.logits if scores.HasField("logits") else None,
    )


def _prompt_deltas(
    message: frontend_pb2.StepTokens, choices: Mapping[int, Choice]
) -> Iterable[PromptDelta]:
    for each in message.prompt_scores:
        if (choice := choices.get(each.number)) is not None:
            scores = PromptScores(tuple(each.logprobs), _tops(each.tops))
            yield PromptDelta(choice.request_id, each.first_index, scores)


def _top_lists(tops: Sequence[TopTokens]) -> frontend_pb2.TopLists | None:
    if not tops:
        return None
    return frontend_pb2.TopLists(
        count=[len(top.token_ids) for top in tops],
        ids=[token_id for top in tops for token_id in top.token_ids],
        logprobs=[logprob for top in tops for logprob in top.logprobs],
    )


def _tops(lists: frontend_pb2.TopLists) -> tuple[TopTokens, ...]:
    tops = []
    start = 0
    for count in lists.count:
        end = start + count
        tops.append(TopTokens(tuple(lists.ids[start:end]), tuple(lists.logprobs[start:end])))
        start = end
    return tuple(tops)


# ---------------------------------------------------------------- verdicts


def condemned_message(condemn: Condemn) -> frontend_pb2.ToFrontend:
    """A worker's process that must be killed."""
    condemned = frontend_pb2.Condemned(
        worker_id=condemn.worker_id,
        incarnation=condemn.incarnation,
        pid=condemn.pid,
        reason=printable(condemn.reason),
    )
    return frontend_pb2.ToFrontend(condemned=condemned)


def condemn_of(message: frontend_pb2.Condemned) -> Condemn:
    """The verdict in it."""
    return Condemn(message.worker_id, message.incarnation, message.pid, message.reason)


def printable(text: str) -> str:
    """Without lone surrogates, which no message may hold."""
    return text.encode(errors="replace").decode()

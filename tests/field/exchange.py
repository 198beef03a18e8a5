"""Sends a neutral request over HTTP or gRPC, and reads what came back in the same terms."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from protos import inference_pb2
from tests.field.answers import (
    FINISH_NAMES,
    Refused,
    grpc_refusal,
    http_refusal,
    read_sse,
    strict_json,
)
from tests.field.field_cluster import FieldCluster
from tests.field.neutral_request import NeutralRequest, Prompt

CALL_DEADLINE_S = 120.0
QUEUE_DEADLINE_S = 120.0
QUEUE_PAUSE_S = 0.05
Scores = list[float | None]


@dataclass
class Said:
    """One choice. logprobs, tops: of the output, behind those of an echoed prompt. tops: the best
    log-probabilities at each place; none at the first of a prompt. marks: over gRPC, tokens and
    characters that were there after each message.
    """

    text: str = ""
    ids: list[int] | None = None
    logprobs: Scores = field(default_factory=list)
    tops: list[list[float]] = field(default_factory=list)
    prompt_logprobs: Scores = field(default_factory=list)
    prompt_tops: list[list[float]] = field(default_factory=list)
    finish: str | None = None
    marks: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])


@dataclass
class Outcome:
    """A refusal, or choices with usage.

    usage: prompt and output tokens, seed; None if HTTP was not asked for it. prompt_ids: gRPC's.
    """

    refused: Refused | None = None
    choices: list[Said] = field(default_factory=list)
    usage: tuple[int, int, int] | None = None
    prompt_ids: list[int] = field(default_factory=list)


def patiently(ask: Callable[[], Outcome]) -> Outcome:
    """Asks again while the queue is full, as a client should."""
    deadline = time.monotonic() + QUEUE_DEADLINE_S
    while True:
        outcome = ask()
        if outcome.refused is None or outcome.refused.reason != "QUEUE_FULL":
            return outcome
        assert time.monotonic() < deadline, f"the queue was full for {QUEUE_DEADLINE_S} s"
        time.sleep(QUEUE_PAUSE_S)


# ---------------------------------------------------------------- HTTP


def http_body(request: NeutralRequest, random: Random) -> tuple[str, dict[str, Any]]:
    """Path and body, in one of the ways that HTTP has to say it."""
    body = dict(request.fields)
    if "logit_bias" in body:
        body["logit_bias"] = {str(each): bias for each, bias in body["logit_bias"].items()}
    if len(body.get("stop", ())) == 1 and random.random() < 0.5:
        body["stop"] = body["stop"][0]
    if "max_tokens" in body and random.random() < 0.3:
        body["max_completion_tokens"] = body.pop("max_tokens")
    if request.is_chat:
        body["messages"] = request.prompts[0]
    else:
        alone = len(request.prompts) == 1 and random.random() < 0.8
        body["prompt"] = request.prompts[0] if alone else request.prompts
        wants = body.pop("logprobs", False)
        tops = body.pop("top_logprobs", None)
        if wants:
            body["logprobs"] = tops or 0
        if request.echo or random.random() < 0.1:
            body["echo"] = request.echo
    if request.prompt_logprobs is None and random.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": random.random() < 0.8}}
    if random.random() < 0.9:
        body["return_token_ids"] = True
    nulls = random.sample(("stop", "n", "seed", "max_tokens", "logit_bias", "tools", "user"), k=2)
    body |= {name: None for name in nulls if name not in body}
    return f"/v1/{'chat/' * request.is_chat}completions", body


def over_http(
    field: FieldCluster, request: NeutralRequest, path: str, body: Mapping[str, Any]
) -> Outcome:
    """One try."""
    content = json.dumps(body)  # NaN and Infinity, too, as careless clients write them
    with field.http.stream("POST", path, content=content, timeout=CALL_DEADLINE_S) as response:
        answer = read_sse(response)
    if answer.status != 200:
        refusal = http_refusal(answer.status, answer.body)
        assert refusal.message.startswith(f"{refusal.parameter}") or refusal.parameter is None
        return Outcome(refusal)
    if not body.get("stream"):
        parts = [strict_json(answer.body)]
    else:
        assert answer.done, f"the stream has no end mark: {answer.events[-2:]}"
        parts = answer.chunks
    failed = [part["error"] for part in parts if "error" in part]
    assert not failed, f"the stream failed: {failed}"
    outcome = Outcome()
    said: dict[int, Said] = {}
    for part in parts:
        if part.get("usage"):
            usage = part["usage"]
            counts = (usage["prompt_tokens"], usage["completion_tokens"])
            outcome.usage = (*counts, usage["polychip"]["seed"])
        for choice in part["choices"]:
            add_choice(said.setdefault(choice["index"], Said()), choice, part, request)
    outcome.choices = [said[index] for index in sorted(said)]
    return outcome


def add_choice(
    said: Said, choice: Mapping[str, Any], part: Mapping[str, Any], request: NeutralRequest
) -> None:
    """Adds what a chunk or a whole body has of a choice."""
    assert said.finish is None, "a choice went on after its end"
    message = choice.get("message", choice.get("delta"))
    said.text += (choice["text"] if message is None else message.get("content")) or ""
    if "token_ids" in choice:
        said.ids = (said.ids or []) + choice["token_ids"]
    scores = choice["logprobs"] or {}
    for token in scores.get("content", ()):
        said.logprobs.append(token["logprob"])
        if request.top_logprobs:
            said.tops.append(best([each["logprob"] for each in token["top_logprobs"]], request))
    said.logprobs += scores.get("token_logprobs", [])
    for listed in scores.get("top_logprobs") or ():
        said.tops.append(best((listed or {}).values(), request))
    # Of a conversation they stand at the top level.
    alone = part.get("prompt_logprobs") if choice["index"] == 0 else None
    prompt = choice.get("prompt_logprobs", alone) or []
    count = request.prompt_logprobs or 0
    for place in prompt:
        # The prompt's own token stands first, the others are ranked.
        entries = list((place or {}).values())
        said.prompt_logprobs.append(entries[0]["logprob"] if entries else None)
        said.prompt_tops.append(sorted((e["logprob"] for e in entries), reverse=True)[:count])
    said.finish = choice["finish_reason"]


def best(listed: Iterable[float], request: NeutralRequest) -> list[float]:
    """The log-probabilities of the likeliest; a list of HTTP may have the drawn token besides."""
    return sorted(listed, reverse=True)[: request.top_logprobs]


# ---------------------------------------------------------------- gRPC


def grpc_message(
    field: FieldCluster, request: NeutralRequest, prompt: Prompt
) -> inference_pb2.GenerateRequest:
    """The request for one of its prompts."""
    fields = dict(request.fields)
    if request.echo and (request.logprobs or fields.get("max_tokens") == 0):
        wanted = request.top_logprobs if request.logprobs else 0
        fields["prompt_logprobs"] = max(wanted, request.prompt_logprobs or 0)
    message = field.grpc_request("", **({"temperature": None, "logprobs": None} | fields))
    if request.is_chat:
        message.chat.SetInParent()
        for each in prompt:
            assert isinstance(each, Mapping)
            message.chat.messages.add(**each)
    elif isinstance(prompt, str):
        message.prompt = prompt
    else:
        message.prompt_ids.SetInParent()
        message.prompt_ids.ids.extend(prompt)
    return message


def over_grpc(
    field: FieldCluster, request: NeutralRequest, message: inference_pb2.GenerateRequest
) -> Outcome:
    """One try."""
    outcome = Outcome()
    said: dict[int, Said] = {}
    prompt = inference_pb2.PromptLogprobs(first_index=1)
    resumed = dict(enumerate(len(each.ids) for each in message.resume_output_ids))
    try:
        for piece in field.client.inference.Generate(message, timeout=CALL_DEADLINE_S):
            outcome.prompt_ids.extend(piece.prompt_ids)
            choice = said.setdefault(piece.choice, Said(ids=[]))
            add_piece(choice, piece, resumed.get(piece.choice, 0))
            if piece.HasField("prompt_logprobs"):
                add_prompt(prompt, piece, said)
            if piece.HasField("usage"):
                usage = piece.usage
                outcome.usage = (usage.prompt_tokens, usage.completion_tokens, usage.seed)
    except grpc.RpcError as error:
        return Outcome(grpc_refusal(error))
    outcome.choices = [said[index] for index in sorted(said)]
    for index, choice in enumerate(outcome.choices):
        put_prompt_first(choice, prompt, request, is_first=index == 0)
    return outcome


def add_piece(said: Said, piece: inference_pb2.GenerateResponse, resumed_count: int) -> None:
    """Adds what a message has of a choice's output."""
    assert said.finish is None, "a choice went on after its end"
    assert said.ids is not None
    if piece.token_ids:
        expected = resumed_count + len(said.ids)
        assert piece.first_index == expected, "an index was repeated or skipped"
    said.ids.extend(piece.token_ids)
    said.text += piece.text
    said.logprobs += piece.logprobs
    said.tops += [list(each.logprobs) for each in piece.top_tokens]
    said.finish = FINISH_NAMES.get(piece.finish_reason)
    said.marks.append((len(said.ids), len(said.text)))


def add_prompt(
    prompt: inference_pb2.PromptLogprobs,
    piece: inference_pb2.GenerateResponse,
    said: dict[int, Said],
) -> None:
    """The scores of the prompt, which come once, before choice 0 has a token."""
    scores = piece.prompt_logprobs
    assert piece.choice == 0, "scores of the prompt came with another choice"
    assert len(said[0].ids or ()) == len(piece.token_ids), "they came after a token"
    assert scores.first_index == len(prompt.logprobs) + 1, "they were repeated or skipped"
    prompt.logprobs.extend(scores.logprobs)
    prompt.top_tokens.extend(scores.top_tokens)


def put_prompt_first(
    said: Said, prompt: inference_pb2.PromptLogprobs, request: NeutralRequest, *, is_first: bool
) -> None:
    """As HTTP has it: nothing for the token that nothing predicts; in an echo with every choice."""
    scores: Scores = [None, *prompt.logprobs]
    tops = [[], *(list(each.logprobs) for each in prompt.top_tokens)]
    tops += [[]] * (len(scores) - len(tops))
    if request.echoes_logprobs:
        said.logprobs = scores + said.logprobs
        if request.top_logprobs:
            said.tops = [each[: request.top_logprobs] for each in tops] + said.tops
    if request.prompt_logprobs is not None and is_first:
        said.prompt_logprobs = scores
        said.prompt_tops = [each[: request.prompt_logprobs] for each in tops]

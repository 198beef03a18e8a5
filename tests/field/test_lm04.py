"""LM04: empty prompts, ids that do not exist, and echo with max_tokens 0 each killed the engine.

Here nothing of it reaches a worker but the last, whose one result is the prompt's own scores. An
empty text is refused even where the model would put a start token before it: nobody means that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import pytest
import torch

from protos import inference_pb2
from tests.fakes.dense_llama import dense_logits
from tests.field.answers import Answer, Refused, grpc_refusal, http_refusal
from tests.field.field_cluster import (
    CALL_DEADLINE_S,
    LOGPROB_TOLERANCE,
    PROTOCOLS,
    FieldCluster,
    Prompt,
)
from tests.field.shared_specs import MIX, STARTLESS_ALTERNATING

pytestmark = pytest.mark.end_to_end

SPECS = {"start": MIX, "startless": STARTLESS_ALTERNATING}
WITH_AND_WITHOUT_START = pytest.mark.parametrize("field", SPECS.values(), ids=SPECS, indirect=True)
HTTP = ("http", "http-stream")
VOCABULARY = 512
TEXT = "the quick brown fox"
BIG = 10**18
HUGE = 10**400
"""More than any number type of a wire holds, and more than a float."""


def check_refused(refused: Refused, name: str) -> None:
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.status in (400, None)
    assert refused.parameter == name
    assert refused.message.startswith(name)


def refusal(
    field: FieldCluster, protocol: str, prompt: Prompt, parameters: Mapping[str, object]
) -> Refused:
    with pytest.raises(Refused) as caught:
        field.ask(protocol, prompt, **({"max_tokens": 4} | parameters))
    return caught.value


def bad_requests(protocol: str) -> list[tuple[str, Prompt, dict[str, object]]]:
    """The field at fault, the prompt, and what else is sent."""
    cases: list[tuple[str, Any, dict[str, object]]] = [
        ("prompt", "", {}),
        ("prompt", [], {}),
        ("prompt", [VOCABULARY], {}),
        ("prompt", [5, VOCABULARY, 6], {}),
        ("prompt", [(1 << 32) - 1], {}),
        ("max_tokens", TEXT, {"max_tokens": 0}),
        ("min_tokens", TEXT, {"max_tokens": 0, "min_tokens": 1, "prompt_logprobs": 0}),
        ("max_tokens", TEXT, {"max_tokens": (1 << 32) - 1}),
    ]
    if protocol == "http-stream":  # where prompt_logprobs is refused whatever the rest is
        cases = [case for case in cases if "prompt_logprobs" not in case[2]]
    if protocol in HTTP:  # what gRPC's messages cannot even hold
        cases += [("prompt", [each], {}) for each in (-1, BIG, HUGE, -HUGE)]
        cases += [("max_tokens", TEXT, {"max_tokens": each}) for each in (-1, -BIG, BIG)]
        cases += [
            ("prompt", ["the", ""], {}),
            ("prompt", [[5], []], {}),
            ("prompt", [[]], {}),
            ("prompt", ["the", ""], {"echo": True, "max_tokens": 0}),
            ("prompt", [[5], [VOCABULARY]], {}),
            ("prompt", [1.5], {}),
            ("prompt", [True], {}),
            ("prompt", [None], {}),
            ("prompt", ["the", [5]], {}),
        ]
    return cases


@WITH_AND_WITHOUT_START
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_hostile_prompts_and_lengths_are_refused(field: FieldCluster, protocol: str) -> None:
    field.check_alive()
    pids = field.worker_pids()
    for name, prompt, parameters in bad_requests(protocol):
        check_refused(refusal(field, protocol, prompt, parameters), name)
    check_refused(no_prompt(field, protocol), "prompt")
    check_refused(no_messages(field, protocol), "messages")
    assert field.worker_pids() == pids
    field.check_alive()


def no_prompt(field: FieldCluster, protocol: str) -> Refused:
    """A request without any."""
    if protocol == "grpc":
        return rpc_refusal(field, inference_pb2.GenerateRequest())
    body = {"max_tokens": 4, "stream": protocol == "http-stream"}
    response = field.http.post("/v1/completions", json=body)
    return http_refusal(response.status_code, response.text)


def no_messages(field: FieldCluster, protocol: str) -> Refused:
    """A conversation that has not begun."""
    if protocol == "grpc":
        return rpc_refusal(field, inference_pb2.GenerateRequest(chat=inference_pb2.Chat()))
    body = {"messages": [], "max_tokens": 4, "stream": protocol == "http-stream"}
    response = field.http.post("/v1/chat/completions", json=body)
    return http_refusal(response.status_code, response.text)


def rpc_refusal(field: FieldCluster, request: inference_pb2.GenerateRequest) -> Refused:
    with pytest.raises(grpc.RpcError) as caught:
        list(field.client.inference.Generate(request, CALL_DEADLINE_S))
    return grpc_refusal(caught.value)


# ---------------------------------------------------------------- only the prompt looked at


def expected_logprobs(field: FieldCluster, ids: Sequence[int]) -> torch.Tensor:
    """Of every token but the first, from an independent Llama."""
    model = field.spec.model
    logprobs = dense_logits(model.shape, model.tensors(), list(ids)).log_softmax(-1)
    return logprobs[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def check_only_scores(field: FieldCluster, answer: Answer, logprobs: Sequence[float]) -> None:
    """Nothing was drawn, and each token but the first has its score."""
    assert (answer.completion_tokens, answer.finish) == (0, "length")
    assert answer.ids == []
    assert len(logprobs) == answer.prompt_tokens - 1
    found, expected = torch.tensor(logprobs), expected_logprobs(field, answer.prompt_ids)
    assert (found - expected).abs().max() < LOGPROB_TOLERANCE


@WITH_AND_WITHOUT_START
@pytest.mark.parametrize("protocol", HTTP)
@pytest.mark.parametrize("length", [2, 16, 33, 255])
def test_an_echo_of_nothing_but_the_prompt(field: FieldCluster, protocol: str, length: int) -> None:
    prompt = [5 + each % 500 for each in range(length)]
    answer = field.ask(protocol, prompt, max_tokens=0, echo=True, logprobs=2)
    first, *logprobs = answer.logprobs
    assert first is None
    assert answer.text == field.tokenizer.decode(prompt)
    check_only_scores(field, answer, logprobs)
    # Nothing at all to compute.
    plain = field.ask(protocol, TEXT, max_tokens=0, echo=True, logprobs=None)
    assert (plain.text, plain.finish, plain.completion_tokens) == (TEXT, "length", 0)


@WITH_AND_WITHOUT_START
def test_the_same_over_grpc(field: FieldCluster) -> None:
    answer = field.ask("grpc", TEXT, max_tokens=0, prompt_logprobs=0)
    logprobs = [value for message in answer.raw for value in message.prompt_logprobs.logprobs]
    assert answer.text == ""
    check_only_scores(field, answer, logprobs)


@WITH_AND_WITHOUT_START
@pytest.mark.parametrize("protocol", HTTP)
def test_a_single_token_has_no_score(field: FieldCluster, protocol: str) -> None:
    answer = field.ask(protocol, [42], max_tokens=0, echo=True, logprobs=0)
    assert answer.logprobs == [None]
    assert (answer.prompt_tokens, answer.completion_tokens) == (1, 0)
    assert answer.finish == "length"
    field.check_alive()

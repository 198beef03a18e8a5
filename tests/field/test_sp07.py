"""SP07: ids beyond the tokenizer are sampled because the model has more logits than it has tokens.

Here the worker cuts the logits to the tokenizer's vocabulary before it draws, lists or normalizes,
though in this model one of the padding rows is always the likeliest.
"""

from collections.abc import Callable, Iterator

import grpc
import pytest
import torch

from tests.fakes.dense_llama import dense_logits
from tests.fakes.field_models import FieldModel, Mix
from tests.fakes.field_tokenizers import SPECIAL_TEXTS
from tests.field.answers import Answer, Refused
from tests.field.field_cluster import LOGPROB_TOLERANCE, PROTOCOLS, ClusterSpec, FieldCluster

pytestmark = pytest.mark.end_to_end

CLUSTER = ClusterSpec(FieldModel(Mix(flat=True, padded=True)))
VOCABULARY = 512
PROMPT = "the quick brown fox"
CHAT = [{"role": "user", "content": PROMPT}]
TOPS = 5
CHOICES, CHOICE_TOKENS = 4, 50


def listed_ids(field: FieldCluster, answer: Answer) -> Iterator[int]:
    """Every id among the likeliest tokens, in whatever shape the protocol has."""
    known = {field.tokenizer.text_bytes(token_id) for token_id in range(VOCABULARY)}
    known = known - {b""} | {text.encode() for text in SPECIAL_TEXTS}
    for part in answer.raw:
        if not isinstance(part, dict):
            for top in [*part.top_tokens, *part.prompt_logprobs.top_tokens]:
                yield from top.ids
            continue
        for choice in part["choices"]:
            scores = choice.get("logprobs") or {}
            for place in scores.get("top_logprobs") or []:
                assert "" not in (place or {}), "an id without a text is listed"
            for each in scores.get("content") or []:
                assert all(bytes(top["bytes"]) in known for top in each["top_logprobs"])
            for entry in choice.get("prompt_logprobs") or []:
                yield from map(int, entry or {})
        for entry in part.get("prompt_logprobs") or []:
            yield from map(int, entry or {})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_drawn_ids_are_in_the_vocabulary(
    field: FieldCluster, counted: Callable[[int], int], protocol: str
) -> None:
    drawn: list[int] = []
    while len(drawn) < counted(2000):
        answer = field.ask(
            protocol,
            PROMPT,
            n=CHOICES,
            max_tokens=CHOICE_TOKENS,
            temperature=2.0,
            seed=len(drawn),
            ignore_eos=True,
        )
        drawn.extend(token_id for choice in answer.choices for token_id in choice.ids)
    assert max(drawn) < VOCABULARY
    # All of the vocabulary, the last token of it too, can be drawn.
    last = field.ask(
        protocol, PROMPT, max_tokens=2, logit_bias={VOCABULARY - 1: 100}, temperature=2.0
    )
    assert last.ids == [VOCABULARY - 1] * 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("prompt", [PROMPT, CHAT], ids=["text", "chat"])
def test_greedy_and_listed_ids_are_in_the_vocabulary(
    field: FieldCluster, protocol: str, prompt: str | list[dict[str, str]]
) -> None:
    parameters: dict[str, object] = {"logprobs": True, "top_logprobs": TOPS}
    if prompt is PROMPT and protocol != "grpc":
        parameters = {"logprobs": TOPS}
    if protocol != "http-stream":
        parameters["prompt_logprobs"] = TOPS
    answer = field.ask(protocol, prompt, max_tokens=20, ignore_eos=True, **parameters)
    assert max([*answer.ids, *listed_ids(field, answer)]) < VOCABULARY
    # The probabilities are those of the vocabulary alone.
    model = field.spec.model
    ids = [*answer.prompt_ids, *answer.ids]
    logits = dense_logits(model.shape, model.tensors(), ids)[-len(answer.ids) - 1 : -1]
    assert logits.argmax(-1).min() >= VOCABULARY
    logits = logits[:, :VOCABULARY]
    logprobs = logits.log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(answer.ids)[:, None])[:, 0]
    assert (logprobs.amax(-1) - expected).max() < LOGPROB_TOLERANCE, "not the likeliest"
    assert (torch.tensor(answer.logprobs) - expected).abs().max() < LOGPROB_TOLERANCE


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_such_ids_cannot_be_sent_either(field: FieldCluster, protocol: str) -> None:
    outside = VOCABULARY
    for name, prompt, parameters in (
        ("prompt", [1, outside], {}),
        ("logit_bias", PROMPT, {"logit_bias": {outside: 1.0}}),
        ("stop_token_ids", PROMPT, {"stop_token_ids": [outside]}),
    ):
        with pytest.raises(Refused) as caught:
            field.ask(protocol, prompt, max_tokens=2, **parameters)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.parameter == name

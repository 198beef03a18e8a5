"""Gemma 3 270M, the second packaged model: the reference's answers with one chip and with two.

Its layers with a sliding window of 512 tokens keep other blocks than those that see everything, so
long prompts, answers that pass the window, and prefix hits behind it all count here. Goal: the same
ids as transformers, log-probabilities within 1e-3, whatever was cached.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from scripts.topology import PACKAGED_MODELS
from tests.end_to_end.cluster import Clusters
from tests.end_to_end.generation import Client, Generation, request_of

GEMMA = PACKAGED_MODELS["gemma3"]
REFERENCE = json.loads((Path(__file__).parents[1] / "golden" / "gemma3-270m-fp32.json").read_text())
LOGPROB_TOLERANCE = 1e-3
WINDOW = 512

pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.long,
    pytest.mark.skipif(
        GEMMA.path() is None, reason=f"the model is not installed; {GEMMA.install} brings it"
    ),
]


@pytest.fixture(scope="module", params=["1", "2"], ids=["1-chip", "2-chips"])
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Of the service: one group of one chip or of two. Pool and chunks are small."""
    return (
        *("--model", "gemma3", "--groups", request.param, "--dtype", "float32"),
        *("--chunk-tokens", "256", "--kv-blocks", "400", "--context", "4096"),
    )


@pytest.fixture
def client(options: tuple[str, ...], clusters: Clusters) -> Iterator[Client]:
    """A service with an empty prefix cache; idle afterwards, with no block referenced."""
    running = clusters.client(*options)
    running.flush()
    yield running
    (group,) = running.status().groups
    assert group.blocks.referenced == 0
    assert group.blocks.free + group.blocks.cached == group.blocks.total


def check(answer: Generation, case: dict[str, object]) -> None:
    """The reference's ids; where it nearly tied, either token, after which the answers part."""
    tops = case["top5_logprobs"]
    assert isinstance(tops, list)
    assert answer.prompt_ids == case["prompt_ids"]
    assert len(answer.ids) == len(tops)
    for place, (token, logprob, five) in enumerate(
        zip(answer.ids, answer.logprobs, tops, strict=True)
    ):
        expected = dict(map(tuple, five))
        assert token in expected, f"token {place}"
        assert abs(logprob - expected[token]) < LOGPROB_TOLERANCE, f"token {place}"
        best = max(expected.values())
        assert best - expected[token] < LOGPROB_TOLERANCE, f"token {place}"
        if expected[token] < best:
            return


def test_answers_are_the_references_whatever_is_cached(client: Client) -> None:
    cases = REFERENCE["cases"]
    assert max(len(case["prompt_ids"]) for case in cases) > 2 * WINDOW
    for turn in ("cold", "warm"):
        for case in cases:
            answer = client.generate(request_of(case["prompt_ids"], len(case["output_ids"])))
            check(answer, case)
            assert answer.usage is not None
            # The long prompts begin alike, so even the first time some of it may be there.
            if turn == "warm" and len(case["prompt_ids"]) > WINDOW:
                assert answer.usage.cached_tokens > 0, len(case["prompt_ids"])


def test_answers_are_the_references_in_company(client: Client) -> None:
    cases = REFERENCE["cases"]
    requests = [request_of(case["prompt_ids"], len(case["output_ids"])) for case in cases]
    for answer, case in zip(client.generate_all(requests), cases, strict=True):
        check(answer, case)


def test_a_conversation_of_its_own_answers_hits_behind_the_window(client: Client) -> None:
    """Prompt and answer together are the next prompt; what is cached of them gives the same."""
    case = REFERENCE["cases"][5]
    assert len(case["prompt_ids"]) < WINDOW < len(case["prompt_ids"]) + len(case["output_ids"])
    client.generate(request_of(case["prompt_ids"], len(case["output_ids"])))
    longer = [*case["prompt_ids"], *case["output_ids"]]
    warm = client.generate(request_of(longer, 24))
    assert warm.usage is not None
    assert warm.usage.cached_tokens >= WINDOW
    client.flush()
    cold = client.generate(request_of(longer, 24))
    assert cold.usage is not None
    assert cold.usage.cached_tokens == 0
    assert warm.ids == cold.ids
    assert warm.text == cold.text


def test_text_over_http_and_no_chat(clusters: Clusters, options: tuple[str, ...]) -> None:
    """A base model goes on with a text; a conversation is refused with the way out."""
    cluster = clusters.cluster(*options)
    case = REFERENCE["cases"][0]
    ask = {"model": "default", "temperature": 0, "max_tokens": len(case["output_ids"])}
    chat = {**ask, "messages": [{"role": "user", "content": "hi"}]}
    text = {**ask, "prompt": case["prompt"], "return_token_ids": True}
    with httpx.Client(base_url=cluster.http, timeout=120, trust_env=False) as http:
        (choice,) = http.post("/v1/completions", json=text).raise_for_status().json()["choices"]
        refused = http.post("/v1/chat/completions", json=chat)
    assert choice["prompt_token_ids"] == case["prompt_ids"]
    assert choice["text"].startswith(" the capital of the country of France.")
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "no chat template" in message
    assert "/v1/completions" in message
    # What is printed at the start can be pasted, so it asks for no chat.
    assert "/v1/chat/completions" not in cluster.output()

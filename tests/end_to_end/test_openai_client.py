"""OpenAI's own client library against a real service: what it sends is understood, what it gets is
what it expects, and refusals are the exceptions its users catch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.end_to_end.cluster import ORDINARY, Clusters

OPTIONS = ORDINARY
NARROW = (*OPTIONS, "--max-running", "1", "--max-queue", "1")
"""One request is computed at a time, and one may wait."""
KEY = "a-key-for-tests"
BURST = 8
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
COUNTING = "One, two, three, four, five, six,"


@pytest.fixture
def client(clusters: Clusters) -> Iterator[openai.OpenAI]:
    """A client of a service that asks for no key."""
    with connected(clusters.cluster(*OPTIONS).http, "none") as connection:
        yield connection


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "api-keys"
    path.write_text(f"another-key\n{KEY}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def narrow_url(clusters: Clusters, key_file: Path) -> str:
    """A narrow service that asks for a key."""
    return clusters.cluster(*NARROW, "--api-key-file", str(key_file)).http


@contextmanager
def connected(url: str, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=0,
        timeout=120,
        http_client=httpx.Client(trust_env=False, timeout=120),
    ) as client:
        yield client


@pytest.mark.end_to_end
def test_models(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert "default" in names
    assert client.models.retrieve(names[0]).id == names[0]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-unknown")
    assert caught.value.code == "MODEL_NOT_FOUND"


@pytest.mark.end_to_end
def test_a_conversation_whole_and_streamed(client: openai.OpenAI) -> None:
    ask = {"model": "default", "messages": FRANCE, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**ask)
    assert whole.object == "chat.completion"
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert "Paris" in choice.message.content
    chunks = list(
        client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    last = chunks.pop()
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.id == chunks[0].id for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + [choice.finish_reason]


@pytest.mark.end_to_end
def test_a_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    ask = {"model": "default", "prompt": COUNTING, "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**ask)
    assert whole.object == "text_completion"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    chunks = list(client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.end_to_end
@pytest.mark.parametrize("seed", [None, 11])
def test_three_choices(client: openai.OpenAI, seed: int | None) -> None:
    ask = {"model": "default", "messages": FRANCE, "n": 3, "temperature": 1.2, "max_tokens": 16}
    ask |= {} if seed is None else {"seed": seed}
    alone = client.chat.completions.create(**(ask | {"n": 1}))
    whole = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) > 1
    assert whole.usage.prompt_tokens == alone.usage.prompt_tokens
    ids_count = sum(len(choice.token_ids) for choice in whole.choices)
    assert whole.usage.completion_tokens == ids_count
    texts = {0: "", 1: "", 2: ""}
    ended = dict.fromkeys(texts, 0)
    for chunk in client.chat.completions.create(**ask, stream=True):
        (choice,) = chunk.choices
        assert not ended[choice.index]
        texts[choice.index] += choice.delta.content or ""
        ended[choice.index] += choice.finish_reason is not None
    assert set(ended.values()) == {1}
    assert len(set(texts.values())) > 1


@pytest.mark.end_to_end
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string(client: openai.OpenAI, stream: bool) -> None:
    ask = {"model": "default", "prompt": COUNTING, "temperature": 0, "max_tokens": 16}
    text = client.completions.create(**ask).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    if stream:
        chunks = list(client.completions.create(**ask, stop=[stop, "never said"], stream=True))
        cut = "".join(chunk.choices[0].text for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = client.completions.create(**ask, stop=stop).choices
        cut, reason = choice.text, choice.finish_reason
    assert cut == text[: text.index(stop)]
    assert reason == "stop"


@pytest.mark.end_to_end
def test_log_probabilities_of_a_conversation(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=FRANCE,
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=4,
    )
    (choice,) = answer.choices
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 4
        numbers = [each.logprob for each in token.top_logprobs]
        assert numbers == sorted(numbers, reverse=True)
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"
        assert token.logprob == pytest.approx(numbers[0], abs=1e-4)
        assert bytes(token.bytes).decode() == token.token


@pytest.mark.end_to_end
def test_log_probabilities_of_an_echoed_prompt(client: openai.OpenAI) -> None:
    ask = {"model": "default", "prompt": COUNTING, "temperature": 0, "echo": True, "logprobs": 2}
    both = client.completions.create(**ask, max_tokens=3)
    (choice,) = both.choices
    assert choice.text.startswith(COUNTING)
    tokens = both.usage.prompt_tokens + both.usage.completion_tokens
    assert len(choice.logprobs.tokens) == tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert all(number <= 0 for number in choice.logprobs.token_logprobs[1:])
    assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs[1:])
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    alone = client.completions.create(**ask, max_tokens=0)
    assert alone.choices[0].text == COUNTING
    assert alone.usage.completion_tokens == 0
    assert alone.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        choice.logprobs.token_logprobs[1 : both.usage.prompt_tokens], abs=1e-4
    )


@pytest.mark.end_to_end
def test_prompts_of_every_kind(client: openai.OpenAI) -> None:
    ask = {"model": "default", "temperature": 0, "max_tokens": 6}
    ids = {"extra_body": {"return_token_ids": True}}
    prompts = [COUNTING, "The sky is"]
    singles = [client.completions.create(**ask, prompt=each, **ids) for each in prompts]
    texts = [single.choices[0].text for single in singles]
    prompts_ids = [single.choices[0].prompt_token_ids for single in singles]
    together = client.completions.create(**ask, prompt=prompts)
    assert [choice.text for choice in together.choices] == texts
    assert together.usage.prompt_tokens == sum(s.usage.prompt_tokens for s in singles)
    by_ids = client.completions.create(**ask, prompt=prompts_ids[0])
    assert by_ids.choices[0].text == texts[0]
    lists = client.completions.create(**ask, prompt=prompts_ids, n=2)
    assert [choice.text for choice in lists.choices] == [texts[0]] * 2 + [texts[1]] * 2


@pytest.mark.end_to_end
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_the_exceptions_users_catch(client: openai.OpenAI, stream: bool) -> None:
    ask = {"model": "default", "messages": FRANCE, "max_tokens": 2, "stream": stream}
    for field, value in (
        ("temperature", -1),
        ("logit_bias", {"-1": 1}),
        ("n", 0),
        ("stop", ""),
        ("top_logprobs", 3),
        ("response_format", {"type": "json_object"}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**(ask | {field: value}))
        assert caught.value.param == field
        assert caught.value.type == "invalid_request_error"
        assert field in caught.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**(ask | {"model": "gpt-unknown"}))
    assert missing.value.code == "MODEL_NOT_FOUND"
    assert missing.value.param == "model"


@pytest.mark.end_to_end
@pytest.mark.service(*NARROW)
def test_a_key_is_asked_for(narrow_url: str) -> None:
    with connected(narrow_url, "wrong") as wrong:
        with pytest.raises(openai.AuthenticationError) as caught:
            wrong.models.list()
        assert caught.value.code == "INVALID_API_KEY"
    with connected(narrow_url, KEY) as right:
        assert len(list(right.models.list())) == 2


@pytest.mark.end_to_end
@pytest.mark.service(*NARROW)
def test_a_full_queue_says_when_to_come_back(narrow_url: str) -> None:
    def ask(client: openai.OpenAI) -> openai.RateLimitError | None:
        try:
            client.completions.create(
                model="default", prompt="Once", max_tokens=40, extra_body={"ignore_eos": True}
            )
        except openai.RateLimitError as error:
            return error
        return None

    with connected(narrow_url, KEY) as client, ThreadPoolExecutor(BURST) as pool:
        outcomes = list(pool.map(ask, [client] * BURST))
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert 0 < len(refused) < BURST
    for error in refused:
        assert error.type == "rate_limit_error"
        assert int(error.response.headers["retry-after"]) >= 1

"""OA01: usage came unasked, streamed counts were wrong, the last chunk had no finish reason.

Usage comes only where it was asked for, once, in the last chunk, which has no choices; every choice
ends with one finish reason, every stream with [DONE], and the counts are those of the tokens.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from protos import inference_pb2
from tests.fakes.field_tokenizers import END
from tests.field.answers import FINISH_NAMES, SseStream, strict_json
from tests.field.field_cluster import FieldCluster, Prompt
from tests.field.shared_specs import ENDS_CHAIN

pytestmark = pytest.mark.end_to_end

CLUSTER = ENDS_CHAIN
TOKENS = 5
TEXT: Prompt = "the quick G"
CHAT: Prompt = [{"role": "user", "content": "the fox"}]
OPTIONS = {
    "absent": {},
    "null": {"stream_options": None},
    "empty": {"stream_options": {}},
    "asked": {"stream_options": {"include_usage": True}},
    "declined": {"stream_options": {"include_usage": False}},
}
ENDS = ("length", "stop string", "stop token", "end token")


@dataclass
class Streamed:
    """What a stream says, read chunk by chunk. text, ids, finish: by choice."""

    text: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None


def read(stream: SseStream, *, asked: bool) -> Streamed:
    """The state machine: chunks of choices that have not ended, then the usage, then the mark."""
    assert stream.status == 200
    assert stream.done
    streamed = Streamed()
    for chunk in stream.chunks:
        assert streamed.usage is None, "a chunk came after the usage"
        assert ("usage" in chunk) == asked
        if chunk.get("usage") is not None:
            assert chunk["choices"] == []
            streamed.usage = chunk["usage"]
            continue
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in streamed.finish, "a choice went on after its end"
        piece = choice["text"] if "text" in choice else choice["delta"].get("content")
        streamed.text[index] = streamed.text.get(index, "") + (piece or "")
        streamed.ids.setdefault(index, []).extend(choice.get("token_ids", []))
        if choice["finish_reason"] is not None:
            streamed.finish[index] = choice["finish_reason"]
    assert (streamed.usage is not None) == asked
    assert streamed.finish.keys() == streamed.text.keys()
    return streamed


def ending(field: FieldCluster, prompt: Prompt, end: str) -> tuple[dict[str, object], str]:
    """Parameters that end the answer so, and the finish reason that is right."""
    if end == "length":
        return {"max_tokens": TOKENS, "ignore_eos": True}, "length"
    if end == "end token":  # the script has one; a conversation names it
        last_id = END if isinstance(prompt, str) else undisturbed(field, prompt).ids[1]
        extra = {} if isinstance(prompt, str) else {"stop_token_ids": [last_id]}
        return {"max_tokens": TOKENS} | extra, "stop"
    answer = undisturbed(field, prompt)
    if end == "stop token":
        return {"max_tokens": TOKENS, "stop_token_ids": [answer.ids[0]]}, "stop"
    last = field.tokenizer.text_bytes(answer.ids[TOKENS - 2]).decode()
    return {"max_tokens": TOKENS, "ignore_eos": True, "stop": [last]}, "stop"


def undisturbed(field: FieldCluster, prompt: Prompt) -> Any:
    return field.ask("grpc", prompt, max_tokens=TOKENS, ignore_eos=True)


@pytest.mark.parametrize("choices_count", [1, 2])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["completion", "chat"])
def test_streams_say_what_they_were_asked(
    field: FieldCluster, prompt: Prompt, end: str, choices_count: int
) -> None:
    parameters, finish = ending(field, prompt, end)
    path, body = field.http_request(prompt, n=choices_count, **parameters)
    whole = strict_json(field.http.post(path, json=body).text)
    for asked, options in OPTIONS.items():
        streamed = read(field.stream(path, body | options), asked=asked == "asked")
        assert sorted(streamed.finish) == list(range(choices_count))
        for choice in whole["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert streamed.text[index] == text
            assert streamed.ids[index] == choice["token_ids"]
            assert streamed.finish[index] == choice["finish_reason"] == finish
        generated = sum(map(len, streamed.ids.values()))
        assert whole["usage"]["completion_tokens"] == generated > 0
        if streamed.usage is not None:
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert streamed.usage[name] == whole["usage"][name]


@pytest.mark.parametrize("shown_ids", [False, True])
@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["completion", "chat"])
def test_an_answer_without_text_still_ends_properly(
    field: FieldCluster, prompt: Prompt, shown_ids: bool
) -> None:
    """Its first token ends it: nothing to show, but an end and the count of that token."""
    first = undisturbed(field, prompt).ids[0]
    path, body = field.http_request(
        prompt, max_tokens=TOKENS, stop_token_ids=[first], return_token_ids=shown_ids, logprobs=None
    )
    streamed = read(field.stream(path, body | OPTIONS["asked"]), asked=True)
    assert (streamed.text, streamed.finish) == ({0: ""}, {0: "stop"})
    assert streamed.ids == {0: [first] if shown_ids else []}
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == 1


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("prompt", [TEXT, CHAT], ids=["completion", "chat"])
def test_grpc_ends_alike(field: FieldCluster, prompt: Prompt, end: str) -> None:
    parameters, finish = ending(field, prompt, end)
    request = field.grpc_request(prompt, n=2, **parameters)
    *messages, last = field.client.inference.Generate(request, timeout=60)
    assert not any(message.HasField("usage") for message in messages)
    assert last.HasField("usage")
    unset = inference_pb2.FINISH_REASON_UNSPECIFIED
    ends = [m for m in (*messages, last) if m.finish_reason != unset]
    assert sorted((m.choice, FINISH_NAMES[m.finish_reason]) for m in ends) == [
        (0, finish),
        (1, finish),
    ]
    assert ends[-1] is last
    generated = sum(len(message.token_ids) for message in (*messages, last))
    assert last.usage.completion_tokens == generated > 0
    over_http = field.ask("http", prompt, n=2, **parameters)
    assert last.usage.prompt_tokens == over_http.prompt_tokens
    assert over_http.completion_tokens == generated

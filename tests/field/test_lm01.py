"""LM01: one prompt over the limit stops the whole server.

Here it is refused at once, with its length and the limit in the message, and running streams never
notice.
"""

import statistics
import time
from collections.abc import Callable

import grpc
import pytest

from tests.field.answers import Refused
from tests.field.field_cluster import CONTEXT, PROTOCOLS, FieldCluster, Prompt
from tests.field.running_streams import running_streams

pytestmark = pytest.mark.end_to_end

REPLY_S = 1.0
OVER = (CONTEXT + 1, 10 * CONTEXT)
"""Tokens of the prompts, the start token included."""


def long_prompts(field: FieldCluster) -> list[tuple[str, Prompt, set[str]]]:
    """Field, prompt, and how the refusal may give its size: a text so long that no tokens could be
    few enough is not tokenized.
    """
    found: list[tuple[str, Prompt, set[str]]] = []
    for tokens_count in OVER:
        text = " the" * (tokens_count - 1)  # one token each
        ids = field.ids_of(text)
        assert len(ids) == tokens_count
        found.append(("prompt", ids, {f"{tokens_count} tokens"}))
        found.append(("prompt", text, {f"{tokens_count} tokens", f"{len(text)} bytes"}))
        rendered = f"<|start|>user: {text}<|turn_end|>\nassistant:"
        rendered_count = len(field.tokenizer.encode(rendered, add_special=False))
        messages = [{"role": "user", "content": text}]
        sizes = {f"{rendered_count} tokens", f"{len(rendered)} bytes"}
        found.append(("messages", messages, sizes))
    return found


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_prompt_over_the_limit_is_refused_at_once(
    field: FieldCluster, counted: Callable[[int], int], protocol: str
) -> None:
    field.check_alive()
    pids = field.worker_pids()
    prompts = long_prompts(field)
    took: list[float] = []
    with running_streams(field):
        for _ in range(counted(20)):
            for name, prompt, sizes in prompts:
                began = time.monotonic()
                with pytest.raises(Refused) as caught:
                    field.ask(protocol, prompt, max_tokens=4)
                took.append(time.monotonic() - began)
                refused = caught.value
                assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
                assert refused.status in (400, None)
                assert refused.parameter == name
                assert f"context of {CONTEXT} tokens" in refused.message
                assert any(f"{name}: {size}" in refused.message for size in sizes)
    assert statistics.median(took) < REPLY_S
    assert field.worker_pids() == pids
    field.check_alive()

"""GR01: the 4 MiB default of gRPC still applies on a hop nobody configured.

Here messages of every hop may be as large as its setting says: a prompt of 5 MB, a step and its
result, an answer above 4 MB. What is larger still is refused at the edge, and the others on the
same connection and the same worker go on.
"""

import grpc
import pytest

from tests.fakes.field_tokenizers import START
from tests.field.answers import Refused
from tests.field.calls import open_call, wait_until
from tests.field.field_cluster import FieldCluster
from tests.field.running_streams import STREAM_PROMPTS, running_streams
from tests.field.scrape import scrape
from tests.field.shared_specs import (
    LARGE,
    LARGE_GRPC_BYTES,
    LARGE_HTTP_BYTES,
    LARGE_LETTERS,
    LARGE_TOPS,
)

pytestmark = pytest.mark.end_to_end

DEFAULT_BYTES = 4 << 20
LONG_TOKENS = 1300
LONG_PROMPT_IDS = 2_200_000
"""Ids above 127 take two bytes each."""
SCORED_TOKENS = 1800
NEIGHBOURS = STREAM_PROMPTS[:2]
NEIGHBOUR_TOKENS = 40
CLUSTER = LARGE


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_prompt_of_5_mb(field: FieldCluster, protocol: str) -> None:
    text = "x" * (LARGE_LETTERS * LONG_TOKENS)
    assert len(text) > 5_000_000
    long_id = field.tokenizer.id_of("x" * LARGE_LETTERS)
    with running_streams(field, NEIGHBOURS, NEIGHBOUR_TOKENS):
        answer = field.ask(protocol, text, max_tokens=3, ignore_eos=True)
    assert answer.prompt_ids == [START, *[long_id] * LONG_TOKENS]
    assert len(answer.ids) == 3


def test_an_answer_above_the_default(field: FieldCluster) -> None:
    """The scores come from the worker in one message, and go to the client in one."""
    prompt = [5 + index % 500 for index in range(SCORED_TOKENS)]
    with running_streams(field, NEIGHBOURS, NEIGHBOUR_TOKENS):
        answer = field.ask(
            "grpc", prompt, max_tokens=1, ignore_eos=True, prompt_logprobs=LARGE_TOPS
        )
    assert max(message.ByteSize() for message in answer.raw) > DEFAULT_BYTES
    scores = [message.prompt_logprobs for message in answer.raw]
    assert sum(len(each.logprobs) for each in scores) == SCORED_TOKENS - 1
    assert all(len(top.ids) == LARGE_TOPS for each in scores for top in each.top_tokens)


def test_a_step_above_the_default(field: FieldCluster) -> None:
    prompt = [200 + index % 300 for index in range(LONG_PROMPT_IDS)]
    with running_streams(field, NEIGHBOURS, NEIGHBOUR_TOKENS):
        before = scrape(field).total("step_bytes")
        call = open_call(field, "grpc", prompt, max_tokens=1, request_id="long")
        wait_until(
            lambda: scrape(field).total("step_bytes") > before + DEFAULT_BYTES or call.is_over,
            "the step is sent",
        )
        assert not call.is_over, call.outcome()
        sent = scrape(field).total("steps_sent")
        # The worker has taken it: at most two steps are on their way.
        wait_until(lambda: scrape(field).total("steps_sent") > sent + 2, "steps go on")
        assert call.cancel()
        assert call.outcome() == "CANCELLED"
    assert scrape(field).total("worker_streams_lost") == 0


@pytest.mark.parametrize(
    ("protocol", "limit_bytes"), [("http", LARGE_HTTP_BYTES), ("grpc", LARGE_GRPC_BYTES)]
)
def test_above_the_limit_is_refused_at_the_edge(
    field: FieldCluster, protocol: str, limit_bytes: int
) -> None:
    text = "x" * (limit_bytes + 1)
    with running_streams(field, NEIGHBOURS, NEIGHBOUR_TOKENS):
        with pytest.raises(Refused) as caught:
            field.ask(protocol, text, max_tokens=1)
        # The connection is still good.
        assert len(field.ask(protocol, "the", max_tokens=1, ignore_eos=True).ids) == 1
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(limit_bytes) in caught.value.message

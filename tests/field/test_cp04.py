"""CP04: a request that is cancelled during its last chunk still emits a token.

Here a cancel is one act in the control plane: what comes after it is nobody's.
"""

import http.client
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import grpc
import pytest

from protos import inference_pb2
from tests.field.field_cluster import CHUNK, FieldCluster
from tests.field.prompts import random_ids
from tests.field.scrape import scrape

pytestmark = pytest.mark.end_to_end

CANCELS = 200
PROMPT_TOKENS = 5 * CHUNK
OVERSHOOT = 1.5
"""Cancels fall between the start and so many times what an undisturbed first token takes."""


def prompt_of(kind: str, index: int) -> list[int]:
    return random_ids(("cp04", kind, index), PROMPT_TOKENS)


def undisturbed_s(field: FieldCluster) -> float:
    """How long it takes to the first token of such a prompt."""
    times = []
    for index in range(3):
        started_at = time.monotonic()
        field.ask("grpc", prompt_of("undisturbed", index), max_tokens=1)
        times.append(time.monotonic() - started_at)
    return min(times)


def delays(field: FieldCluster, counted: Callable[[int], int], seed: int) -> list[float]:
    """Random moments to cancel at, in seconds after sending."""
    longest_s = OVERSHOOT * undisturbed_s(field)
    generator = random.Random(seed)
    return [generator.uniform(0.0, longest_s) for _ in range(counted(CANCELS))]


def outcomes(field: FieldCluster) -> Counter[str]:
    """How many requests came, and how they ended."""
    now = scrape(field)
    return Counter(
        received=int(now.total("requests_received")),
        finished=int(now.total("request_success")),
        failed=int(now.total("request_failures")),
        cancelled=int(now.total("request_failures", "CANCELLED")),
    )


def test_a_cancel_that_found_its_request_ends_it_without_a_token(
    field: FieldCluster, counted: Callable[[int], int]
) -> None:
    """One token is asked for, so a cancel either comes before it, or finds nothing."""
    moments = delays(field, counted, 1)
    before = outcomes(field)
    found_count = 0
    for index, delay in enumerate(moments):
        request = field.grpc_request(prompt_of("call", index), max_tokens=1)
        request.request_id = f"cp04-{index}"
        call = field.client.inference.Generate(request, timeout=60)
        time.sleep(delay)
        cancel = inference_pb2.CancelRequest(request_id=request.request_id)
        found = [field.client.inference.Cancel(cancel, timeout=60).found for _ in range(2)]
        ids, code = read(call)
        assert found != [True, True]
        if any(found):
            assert (ids, code) == ([], grpc.StatusCode.CANCELLED)
            found_count += 1
        else:
            # It was over, or had not come yet: then nobody cancelled it.
            assert (len(ids), code) == (1, grpc.StatusCode.OK)
    assert found_count, "no cancel came in time"
    after = outcomes(field) - before
    assert after["received"] == len(moments)
    assert after["cancelled"] == after["failed"] == found_count
    assert after["finished"] == len(moments) - found_count


def read(
    call: Iterable[inference_pb2.GenerateResponse],
) -> tuple[list[int], grpc.StatusCode]:
    """What a call brings to its end."""
    ids: list[int] = []
    try:
        for message in call:
            ids.extend(message.token_ids)
    except grpc.RpcError as error:
        return ids, error.code()
    return ids, grpc.StatusCode.OK


@pytest.mark.parametrize("way", ["grpc", "http", "http-stream"])
def test_a_client_that_leaves_ends_its_request_once(
    field: FieldCluster, counted: Callable[[int], int], way: str
) -> None:
    moments = delays(field, counted, 2)
    before = outcomes(field)
    for index, delay in enumerate(moments):
        leave(field, way, prompt_of(way, index), delay)
    field.check_idle()
    after = outcomes(field) - before
    # Whoever leaves before the request was read has sent none.
    assert after["received"] == after["finished"] + after["failed"] <= len(moments)
    assert after["failed"] == after["cancelled"] > 0


def leave(field: FieldCluster, way: str, prompt: list[int], delay: float) -> None:
    """Asks for an answer of eight tokens and leaves after so many seconds."""
    if way == "grpc":
        call = field.client.inference.Generate(field.grpc_request(prompt, max_tokens=8))
        time.sleep(delay)
        call.cancel()
        _, code = read(call)
        assert code is grpc.StatusCode.CANCELLED
        return
    path, body = field.http_request(prompt, max_tokens=8, stream=way == "http-stream")
    address = urlsplit(field.cluster.http)
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    content = json.dumps(body)
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    time.sleep(delay)
    connection.close()

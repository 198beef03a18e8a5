"""SP03: a logit_bias outside the vocabulary, or far too large, kills the engine.

Here it is refused with the field's name before anything is queued, and running streams go on.
"""

import math
from collections.abc import Callable

import grpc
import pytest

from tests.field.answers import Refused
from tests.field.field_cluster import PROTOCOLS, FieldCluster
from tests.field.running_streams import STREAM_PROMPTS, running_streams

pytestmark = pytest.mark.end_to_end

VOCABULARY = 512
IDS_OUTSIDE = (VOCABULARY, 10**9, (1 << 32) - 1)
NO_IDS = ("-1", "abc", "1.5", " 1", "", "1e2", "01", str(10**18), "9" * 400)
"""Keys that only JSON can hold: a gRPC client cannot even write them."""
BIASES_OUTSIDE = (1e9, -1e9, 100.5, -100.5, math.nan, math.inf, -math.inf)
NO_BIASES = ("1", None, [1], True)
PROMPT = "some other animals"


def bad_biases(protocol: str) -> list[dict[object, object]]:
    keys: list[object] = [*IDS_OUTSIDE]
    values: list[object] = [*BIASES_OUTSIDE]
    if protocol != "grpc":
        keys += NO_IDS
        values += NO_BIASES
    mixed = {1: 1.0, VOCABULARY: 1.0}
    return [*({key: 1.0} for key in keys), *({5: value} for value in values), mixed]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_bad_bias_is_refused_and_a_stream_goes_on(
    field: FieldCluster, counted: Callable[[int], int], protocol: str
) -> None:
    field.check_alive()
    pids = field.worker_pids()
    with running_streams(field, STREAM_PROMPTS[:1]):
        for _ in range(counted(10)):
            for bias in bad_biases(protocol):
                with pytest.raises(Refused) as caught:
                    field.ask(protocol, PROMPT, max_tokens=4, logit_bias=bias)
                assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT, bias
                assert caught.value.status in (400, None)
                assert caught.value.parameter == "logit_bias"
        # The largest ones that are allowed are in the same batch as the stream.
        allowed = {0: -100.0, VOCABULARY - 1: 100.0}
        answer = field.ask(protocol, PROMPT, max_tokens=4, logit_bias=allowed, ignore_eos=True)
        assert answer.ids == [VOCABULARY - 1] * 4
    assert field.worker_pids() == pids
    field.check_alive()


def test_a_bias_that_is_no_object(field: FieldCluster) -> None:
    for bias in ([], [[5, 1.0]], "5", 5, True):
        path, body = field.http_request(PROMPT, max_tokens=4, logit_bias=bias)
        response = field.http.post(path, json=body)
        assert response.status_code == 400, bias
        assert response.json()["error"]["param"] == "logit_bias"

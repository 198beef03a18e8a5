"""What the scenarios build on: three protocols read alike, and checks that can fail."""

import grpc
import pytest

from protos import admin_pb2
from tests.fakes.dense_llama import dense_greedy
from tests.field.answers import Answer, Choice, Refused
from tests.field.field_cluster import PROTOCOLS, FieldCluster, check_equal, idle_problem, together

PROMPT = "the quick brown fox jumps over the lazy dog and then it runs away from here"
TOKENS = 20
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.mark.end_to_end
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_oracle_is_the_same_over_every_protocol(field: FieldCluster, protocol: str) -> None:
    expected = field.oracle(PROMPT, TOKENS)
    model = field.spec.model
    ids = field.ids_of(PROMPT)
    assert expected.ids == dense_greedy(model.shape, model.tensors(), ids, TOKENS)
    cold = field.ask(protocol, PROMPT, max_tokens=TOKENS, ignore_eos=True)
    warm = field.ask(protocol, ids, max_tokens=TOKENS, ignore_eos=True)
    for answer, cached in ((cold, 0), (warm, 16)):
        check_equal(answer, expected)
        assert (answer.prompt_ids, answer.prompt_tokens) == (ids, len(ids))
        assert (answer.cached_tokens, answer.completion_tokens) == (cached, TOKENS)
        assert (answer.group, answer.retractions, answer.failovers) == ("g0", 0, 0)
    conversations = together(
        *(
            lambda other=other: field.ask(other, CHAT, max_tokens=TOKENS, ignore_eos=True)
            for other in (protocol, "grpc")
        )
    )
    check_equal(*conversations)
    field.check_alive()


@pytest.mark.end_to_end
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_refusals_and_choices_are_read_alike(field: FieldCluster, protocol: str) -> None:
    with pytest.raises(Refused) as caught:
        field.ask(protocol, PROMPT, temperature=-1.0)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.parameter == "temperature"
    answer = field.ask(protocol, PROMPT, max_tokens=4, n=3, temperature=1.0, seed=5)
    assert len(answer.choices) == 3
    assert answer.seed == 5
    with pytest.raises(AssertionError, match="3 choices"):
        _ = answer.text


@pytest.mark.parametrize("changes", [{"ids": [1, 3]}, {"deltas": ["x"]}, {"logprobs": [0, -0.1]}])
def test_unequal_answers_are_told_apart(changes: dict[str, list]) -> None:
    def answer(**parts: list) -> Answer:
        choice = Choice(**{"ids": [1, 2], "deltas": ["ab"], "logprobs": [0.0, -0.5]} | parts)
        return Answer([choice], [], 0, 0, 0, "", 0, 0, 0, [])

    check_equal(answer(), answer(logprobs=[0.00005, -0.5]))
    with pytest.raises(AssertionError):
        check_equal(answer(), answer(**changes))


def test_idle_names_what_is_left() -> None:
    def status(**blocks: int) -> admin_pb2.GetStatusResponse:
        group = admin_pb2.GroupStatus(id="g0", blocks=admin_pb2.BlockCounts(total=64, **blocks))
        return admin_pb2.GetStatusResponse(groups=[group])

    assert idle_problem(status(free=60, cached=4)) is None
    assert "do not close" in str(idle_problem(status(free=60, cached=3)))
    assert "referenced" in str(idle_problem(status(free=60, cached=3, referenced=1)))
    busy = status(free=64)
    busy.requests.intake = 1
    assert idle_problem(busy) == "tables hold {'intake': 1}"

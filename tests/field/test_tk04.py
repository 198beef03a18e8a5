"""TK04: stop strings are shown in part, missed between tokens, or empty."""

import grpc
import pytest

from tests.field.answers import Refused
from tests.field.field_cluster import PROTOCOLS, FieldCluster
from tests.field.shared_specs import ENDS_CHAIN

pytestmark = pytest.mark.end_to_end

STOP = "STOPNOW"
CLUSTER = ENDS_CHAIN


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("trigger", "stop", "tokens_max", "text", "tokens_count", "finish"),
    [
        ("A", [STOP], 20, " thex", 5, "stop"),
        ("A", ["never", STOP, "NOW"], 20, " thex", 5, "stop"),
        ("A", ["OPN", STOP], 20, " thexST", 3, "stop"),
        # The budget ends inside what might have become one.
        ("A", [STOP], 4, " thexSTOPNO", 4, "length"),
        # A near miss is delivered whole, as soon as it is one.
        ("B", [STOP], 5, " foxSTOPNOX over", 5, "length"),
        ("C", ["\n\n"], 20, " lazy", 2, "stop"),
        ("D", ["\n\n"], 20, " brown.", 3, "stop"),
        # A match that begins inside a near miss.
        ("E", [STOP], 20, " jumpsSTO", 3, "stop"),
        ("E", [], 4, " jumpsSTOSTOPNOW away", 4, "length"),
    ],
)
def test_no_part_of_a_stop_string_is_sent(
    field: FieldCluster,
    protocol: str,
    trigger: str,
    stop: list[str],
    tokens_max: int,
    text: str,
    tokens_count: int,
    finish: str,
) -> None:
    answer = field.ask(protocol, trigger, max_tokens=tokens_max, stop=stop or None)
    assert (answer.text, answer.finish) == (text, finish)
    assert answer.completion_tokens == len(answer.ids) == tokens_count
    assert answer.ids == field.script(field.tokenizer.id_of(trigger), tokens_count)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("stop", [[""], [STOP, ""]])
def test_an_empty_stop_string_is_refused(
    field: FieldCluster, protocol: str, stop: list[str]
) -> None:
    with pytest.raises(Refused) as caught:
        field.ask(protocol, "A", max_tokens=4, stop=stop)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.parameter == "stop"


@pytest.mark.parametrize("protocol", ["http", "http-stream"])
def test_one_stop_string_need_not_be_a_list(field: FieldCluster, protocol: str) -> None:
    assert field.ask(protocol, "A", max_tokens=20, stop=STOP).text == " thex"
    with pytest.raises(Refused) as caught:
        field.ask(protocol, "A", max_tokens=20, stop="")
    assert caught.value.status == 400

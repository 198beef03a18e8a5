"""SP02: tiny, NaN or oversized sampling values take the engine down, some only in a mixed batch.

Here a value out of range is refused with its name, one below float32's reach acts greedy, and a
request in the same batch never notices. top_p 0 is taken: it leaves the likeliest token.
"""

import itertools
import math
from collections.abc import Callable

import grpc
import pytest

from tests.field.answers import Answer, Refused
from tests.field.field_cluster import PROTOCOLS, FieldCluster, check_equal, together

pytestmark = pytest.mark.end_to_end

VOCABULARY = 512
TEMPERATURES = (0.0, 1e-12, 1e-4, 2.0, math.nan, -1.0, math.inf)
TOP_PS = (0.0, 1e-6, 1.0, math.nan, 1.5)
TOP_KS = (-2, -1, 0, 1, VOCABULARY, 10 * VOCABULARY)
GREEDY_TEMPERATURES = (0.0, 1e-12, 1e-4)
"""The last is one step of a distribution so sharp that no draw can differ."""
NEUTRAL = {"temperature": 2.0, "top_p": 1.0, "top_k": 0}
PROMPT, TOKENS = "small animals like water", 8
NEIGHBOUR_PROMPT, NEIGHBOUR_TOKENS = "the quick brown fox", 24
SEED = 11
AT_ONCE = 6

Case = dict[str, float]


def cases(count: int, start: int) -> list[Case]:
    """Every value with the others neutral, and `count` cells of the grid from a place on.

    The sizes of the axes have no common factor, so that counting along all three at once meets
    every cell once in 210, and every value in any seven in a row.
    """
    axes = {"temperature": TEMPERATURES, "top_p": TOP_PS, "top_k": TOP_KS}
    singles = [NEUTRAL | {name: value} for name, values in axes.items() for value in values]
    cells = [
        {name: values[index % len(values)] for name, values in axes.items()}
        for index in range(start, start + count)
    ]
    return singles + cells


def bad_fields(case: Case) -> set[str]:
    found = set()
    if not 0 <= case["temperature"] <= 100:
        found.add("temperature")
    if not 0 <= case["top_p"] <= 1:
        found.add("top_p")
    if case["top_k"] < -1:
        found.add("top_k")
    return found


def is_greedy(case: Case) -> bool:
    return case["temperature"] in GREEDY_TEMPERATURES or case["top_p"] < 0.01 or case["top_k"] == 1


def test_the_grid_has_every_cell() -> None:
    size = len(TEMPERATURES) * len(TOP_PS) * len(TOP_KS)
    values = len(TEMPERATURES) + len(TOP_PS) + len(TOP_KS)
    # NaN is one object here and equals itself by identity.
    cells = {tuple(case.values()) for case in cases(size, 70)[values:]}
    assert cells == set(itertools.product(TEMPERATURES, TOP_PS, TOP_KS))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_extreme_values_beside_a_greedy_request(
    field: FieldCluster, counted: Callable[[int], int], protocol: str
) -> None:
    field.check_alive()
    pids = field.worker_pids()
    greedy = field.oracle(PROMPT, TOKENS)
    neighbour = field.oracle(NEIGHBOUR_PROMPT, NEIGHBOUR_TOKENS)
    drawn = ask(field, protocol, NEUTRAL)
    assert isinstance(drawn, Answer)
    assert drawn.ids != greedy.ids

    def ask_neighbour() -> Answer:
        return field.ask(protocol, NEIGHBOUR_PROMPT, max_tokens=NEIGHBOUR_TOKENS, ignore_eos=True)

    def ask_case(case: Case) -> None:
        answer, bad = ask(field, protocol, case), bad_fields(case)
        if bad:
            assert isinstance(answer, Refused), f"{case} was answered"
            check_refusal(answer, bad)
            return
        assert isinstance(answer, Answer), f"{case}: {answer}"
        check_equal(answer, greedy if is_greedy(case) else drawn)

    wanted = cases(counted(210), 70 * PROTOCOLS.index(protocol))
    for start in range(0, len(wanted), AT_ONCE):
        batch = wanted[start : start + AT_ONCE]
        beside, *_ = together(ask_neighbour, *(lambda case=case: ask_case(case) for case in batch))
        check_equal(beside, neighbour)
    assert field.worker_pids() == pids
    field.check_alive()


def ask(field: FieldCluster, protocol: str, case: Case) -> Answer | Refused:
    try:
        return field.ask(protocol, PROMPT, max_tokens=TOKENS, ignore_eos=True, seed=SEED, **case)
    except Refused as refused:
        return refused


def check_refusal(refused: Refused, bad: set[str]) -> None:
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.status in (400, None)
    assert refused.parameter in bad
    assert refused.message.startswith(f"{refused.parameter}:")

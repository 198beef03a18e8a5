"""What `scripts/cluster demo` makes of answers and states: whom it crashes when, its verdict."""

from collections.abc import Callable, Iterator, Mapping

import pytest

from scripts.client import ClientError
from scripts.cluster_demo import Answer, Demonstration, Victim, difference, is_back, victim_of
from scripts.generation import Generation, Piece, TopTokens, Usage

TOKENS = 9
PATIENCE_S = 0.1


def status(*, running: int = 1, incarnation: int = 11, state: str = "serving") -> dict[str, object]:
    """Two groups of one; the second runs the request, on a worker of that incarnation."""
    workers = [
        {"id": "chip0", "pid": 7, "incarnation": 1, "state": "serving"},
        {"id": "chip1", "pid": 8, "incarnation": incarnation, "state": state},
    ]
    groups = [
        {"id": "g0", "ranks": ["chip0"], "running": 0, "state": "serving"},
        {"id": "g1", "ranks": ["chip1"], "running": running, "state": state},
    ]
    return {"workers": workers, "groups": groups}


def piece(index: int, token: int, *, failovers: int | None = None, gap: float = 1.0) -> Piece:
    usage = None
    if failovers is not None:
        usage = Usage(1, TOKENS, 0, "g0", failovers, 0, 0)
    top = TopTokens(ids=(token, 0), logprobs=(-0.5, -0.5 - gap))
    return Piece(index, (token,), f" {token}", top_tokens=(top,), usage=usage)


class FakeClient:
    """A service whose worker is replaced once it was crashed. second: the disturbed answer."""

    def __init__(self, second: list[Piece]) -> None:
        first = [piece(i, i, failovers=0 if i == TOKENS - 1 else None) for i in range(TOKENS)]
        self._answers = [first, second]
        self.crashed = False
        self.shown = 0
        self.flushes = 0

    def flush_cache(self) -> int:
        self.flushes += 1
        return 0

    def status(self) -> Mapping[str, object]:
        return status(incarnation=12 if self.crashed else 11)

    def generate(self, generation: Generation, on_lost: Callable[[], None]) -> Iterator[Piece]:
        del on_lost
        assert generation.temperature == 0.0
        assert generation.deadline_s == PATIENCE_S
        self.shown = 0
        for each in self._answers.pop(0):
            self.shown += 1
            yield each


def second_answer(**changes: Piece) -> list[Piece]:
    """The undisturbed answer, taken over once, with other pieces at the places named p0, p1, ..."""
    pieces = [piece(i, i, failovers=1 if i == TOKENS - 1 else None) for i in range(TOKENS)]
    for name, other in changes.items():
        pieces[int(name[1:])] = other
    return pieces


def demonstrate(client: FakeClient) -> tuple[bool, list[tuple[str, int]]]:
    """Whether it is all right, and what was asked after how many pieces."""
    asked: list[tuple[str, int]] = []

    def ask(line: str) -> None:
        client.crashed = True
        asked.append((line, client.shown))

    demonstration = Demonstration(client, TOKENS, PATIENCE_S, ask)  # type: ignore[arg-type]
    return demonstration.run(), asked


def test_the_worker_that_computes_is_crashed_once_after_a_third() -> None:
    client = FakeClient(second_answer())
    right, asked = demonstrate(client)
    assert right
    assert asked == [("crash chip1 8", TOKENS // 3)]
    assert client.flushes == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"p8": piece(8, 8, failovers=0)}, "FAILED it was taken over"),
        ({"p5": piece(4, 5)}, "FAILED no token was lost"),
        ({"p5": piece(5, 77)}, "FAILED the text differs from token 5"),
    ],
    ids=["never taken over", "a token twice", "another text"],
)
def test_what_is_not_as_it_should_be_fails_and_is_named(
    changes: dict[str, Piece], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    right, _ = demonstrate(FakeClient(second_answer(**changes)))
    assert not right
    assert says in capsys.readouterr().err


def test_an_answer_cut_short_fails(capsys: pytest.CaptureFixture[str]) -> None:
    right, _ = demonstrate(FakeClient(second_answer()[:6]))
    assert not right
    assert f"FAILED the answer went on to its end: 6 of {TOKENS}" in capsys.readouterr().err


def answer(*tokens: int, gaps: tuple[float, ...] = ()) -> Answer:
    return Answer(text=str(tokens), token_ids=list(tokens), gaps=list(gaps))


def test_answers_may_part_at_a_near_tie_only() -> None:
    undisturbed = answer(1, 2, 3, gaps=(1.0, 5e-4, 1.0))
    assert difference(undisturbed, answer(1, 2, 3))[0]
    assert difference(undisturbed, answer(1, 9, 9))[0]
    assert not difference(undisturbed, answer(9, 2, 3))[0]
    assert not difference(undisturbed, answer(1, 2))[0]


def test_equal_tokens_with_another_text_are_named_as_that() -> None:
    same, words = difference(Answer("a", [1, 2]), Answer("b", [1, 2]))
    assert not same
    assert "tokens are the same, but their text differs" in words


def test_nobody_is_crashed_while_another_client_keeps_a_second_group_busy() -> None:
    state = status()
    groups = state["groups"]
    assert isinstance(groups, list)
    groups[0]["running"] = 1
    with pytest.raises(ClientError, match="2 groups run requests, so somebody else uses"):
        victim_of(state)


def test_the_victim_is_rank_0_of_the_group_that_runs() -> None:
    assert victim_of(status()) == Victim("g1", "chip1", 8, 11)
    assert victim_of(status(running=0)) is None


def test_a_worker_is_back_once_a_new_process_serves() -> None:
    victim = Victim("g1", "chip1", 8, 11)
    assert is_back(status(incarnation=12), victim)
    assert not is_back(status(incarnation=11), victim)
    assert not is_back(status(incarnation=12, state="forming"), victim)

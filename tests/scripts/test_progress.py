"""What the launcher tells of one status after another: each change once, in words."""

import anyio
import pytest

from scripts.client import AdminWatcher
from scripts.progress import Progress


class PlayedAdmin(AdminWatcher):
    """Answers with what the test says; None: it does not answer."""

    def __init__(self) -> None:
        self.answer: dict[str, object] | None = None

    async def status(self) -> dict[str, object] | None:
        return self.answer


class Told:
    """A progress and the lines it told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.progress = Progress(self.lines.append)
        self.admin = PlayedAdmin()

    def by(self, frontends: list[dict[str, object]], **worker: object) -> list[str]:
        """What a look at a status tells."""
        workers = [{"id": "chip0", "state": "idle", "reason": "", **worker}]
        self.admin.answer = {"workers": workers, "groups": [], "frontends": frontends}
        return self.look()

    def look(self) -> list[str]:
        self.lines.clear()
        anyio.run(self.progress.look, self.admin)
        return [*self.lines]


def frontend(index: int, state: str, lost_pid: int = 0, lost_status: int = 0) -> dict[str, object]:
    return {"id": f"frontend{index}", "pid": 7, "state": state} | {
        "lost_pid": lost_pid,
        "lost_status": lost_status,
    }


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_lost_frontend_is_told_once_and_in_words(told: Told) -> None:
    other = frontend(1, "listening")
    assert told.by([frontend(0, "listening"), other]) == [
        "chip0 idle",
        "frontend0 listening, frontend1 listening",
    ]
    lost = [frontend(0, "lost", lost_pid=41, lost_status=-9), other]
    assert told.by(lost) == [
        "frontend0 (process 41) was ended by SIGKILL",
        "frontend0 lost, frontend1 listening",
    ]
    assert told.by(lost) == []
    assert told.by([frontend(0, "listening", lost_pid=41, lost_status=-9), other]) == [
        "frontend0 listening, frontend1 listening"
    ]
    assert told.by([frontend(0, "listening", lost_pid=42, lost_status=1), other]) == [
        "frontend0 (process 42) ended with status 1"
    ]


def test_without_frontends_nothing_is_said_of_them(told: Told) -> None:
    assert told.by([]) == ["chip0 idle"]


def test_a_service_that_does_not_answer_tells_nothing(told: Told) -> None:
    assert told.look() == []


def test_the_reasons_of_chips_are_kept_for_the_end(told: Told) -> None:
    told.by([], state="unavailable", reason="burnt")
    told.by([])
    assert told.progress.reasons_of(["chip0", "chip1"]) == ["chip0 is unavailable: burnt"]
    assert told.progress.reasons_of(["chip1"]) == []

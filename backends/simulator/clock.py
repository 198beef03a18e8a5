"""The time a simulated chip and the host thread that drives it live in.

`VirtualClock` moves when something is asked of it and never sleeps, so costs are exact and tests
quick. `WallClock` paces: it sleeps where simulated time would run ahead of real time. Ranks that
run in parallel need a clock each, or one rank's launches would delay the other's.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from typing_extensions import override

# Sleeping costs tens of microseconds, so a wall clock sleeps only for differences from here on.
_SLACK_S = 1e-3
_FOREVER_STEP_S = 1.0
# Two clocks that agree to this are equal: the rest is rounding.
_EQUAL_S = 1e-9


class Clock(ABC):
    """Seconds since the clock was made; they never go back."""

    is_paced: bool
    """Waiting takes real time."""

    @property
    @abstractmethod
    def now_s(self) -> float:
        """The host's time."""

    @abstractmethod
    def advance(self, seconds: float) -> None:
        """The host is busy for so long."""

    @abstractmethod
    def wait_until(self, time_s: float) -> None:
        """The host waits for a time; no wait if it has passed."""

    @abstractmethod
    def wait_forever(self) -> None:
        """The host waits for what never comes; returns only where that takes no real time."""


class VirtualClock(Clock):
    """Moves by itself: waiting is adding."""

    is_paced = False

    def __init__(self) -> None:
        self._now_s = 0.0

    @property
    @override
    def now_s(self) -> float:
        return self._now_s

    @override
    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    @override
    def wait_until(self, time_s: float) -> None:
        self._now_s = max(self._now_s, time_s)

    @override
    def wait_forever(self) -> None:
        """Returns: nobody waits in a time that moves by itself."""


class WallClock(Clock):
    """Simulated time that is real time or, where the host computes faster than the chip, sleeps.

    real and sleep: the monotonic clock in seconds and the way to wait.
    """

    is_paced = True

    def __init__(
        self,
        real: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._real = real
        self._sleep = sleep
        self._started_s = real()
        self._now_s = 0.0

    @property
    @override
    def now_s(self) -> float:
        self._now_s = max(self._now_s, self._elapsed_s())
        return self._now_s

    @override
    def advance(self, seconds: float) -> None:
        self._now_s = self.now_s + seconds
        if self._now_s - self._elapsed_s() >= _SLACK_S:
            self._catch_up()

    @override
    def wait_until(self, time_s: float) -> None:
        self._now_s = max(self.now_s, time_s)
        self._catch_up()

    @override
    def wait_forever(self) -> None:
        while True:
            self._sleep(_FOREVER_STEP_S)

    def _catch_up(self) -> None:
        ahead_s = self._now_s - self._elapsed_s()
        while ahead_s > _EQUAL_S:
            self._sleep(ahead_s)
            ahead_s = self._now_s - self._elapsed_s()

    def _elapsed_s(self) -> float:
        return self._real() - self._started_s

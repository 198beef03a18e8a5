"""The loop around the scheduling core: events in, effects out, one timer, all on the event loop.

intake, dispatch --post--> CoreLoop --handle--> core --effects--> intake, dispatch, timer, log
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from typing import Protocol, get_args

import structlog

from control_plane.dispatch.dispatcher import DispatchEffect
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import (
    Accepted,
    CacheFlushed,
    Condemn,
    DropWorker,
    Effect,
    Event,
    Failed,
    FormGroup,
    Log,
    LogLevel,
    ResetWorker,
    SendRendezvous,
    SendStep,
    ServingChanged,
    Snapshot,
    StepDone,
    Tick,
    Tokens,
    WakeAt,
)

CORE_FAILED = "core.failed"

DELIVER, DISPATCH = "deliver", "dispatch"
STAGES = {kind: re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() for kind in get_args(Event)}
"""The stage of each kind of event: its name in snake case."""

LOG_LEVELS = {
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARNING: logging.WARNING,
}

IntakeEffect = Accepted | Tokens | Failed | CacheFlushed | ServingChanged

_log = structlog.get_logger()


class Core(Protocol):
    """What the loop needs of the scheduling core."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes an event; returns what is to be done about it, in order."""

    def snapshot(self, now: float) -> Snapshot:
        """The present state, for people and tests."""


class CoreLoop:
    """Feeds the core one event at a time. All methods are for the event loop's thread.

    clock: monotonic seconds, fine enough to measure stages with. deliver, carry_out, condemn: take
    effects for intake, for dispatch and for launchers; each may post again. on_failure: called once
    if the core or one of them raises, which is logged; the state is then not to be trusted, so no
    later event is handled. metrics: receives the time of every stage: one for each kind of event
    (`submit`, `step_done`, ...), `deliver` (text and ends found) and `dispatch` (encoded and sent).
    """

    def __init__(
        self,
        core: Core,
        clock: Callable[[], float],
        *,
        deliver: Callable[[IntakeEffect], None],
        carry_out: Callable[[DispatchEffect], None],
        condemn: Callable[[Condemn], None],
        on_failure: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self._core = core
        self._clock = clock
        self._deliver = deliver
        self._carry_out = carry_out
        self._condemn = condemn
        self._on_failure = on_failure
        self._metrics = metrics
        self._events: deque[Event] = deque()
        self._pumping = False
        self._failed = False
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = 0.0

    def post(self, event: Event) -> None:
        """Handles an event and all it leads to, or queues it if called while that happens."""
        if self._failed:
            return
        self._events.append(event)
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._events:
                event = self._events.popleft()
                self._handle(event)
        except Exception:  # noqa: BLE001 - else it ends in the log of whichever server called
            self._failed = True
            _log.critical(CORE_FAILED, event_kind=type(event).__name__, exc_info=True)
            self._on_failure()
        finally:
            self._pumping = False

    def snapshot(self) -> Snapshot:
        """The core's present state."""
        return self._core.snapshot(self._clock())

    def close(self) -> None:
        """Cancels the timer; events are still handled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _handle(self, event: Event) -> None:
        started = self._clock()
        effects = self._core.handle(event, started)
        self._metrics.stage_time(STAGES[type(event)], self._clock() - started)
        if isinstance(event, StepDone):
            self._metrics.step_done(event.group_id, event.device_s)
        for effect in effects:
            self._route(effect)

    def _route(self, effect: Effect) -> None:
        match effect:
            case Tokens() | Accepted() | Failed() | CacheFlushed() | ServingChanged():
                started = self._clock()
                self._deliver(effect)
                self._metrics.stage_time(DELIVER, self._clock() - started)
            case SendStep() | FormGroup() | SendRendezvous() | ResetWorker() | DropWorker():
                started = self._clock()
                self._carry_out(effect)
                self._metrics.stage_time(DISPATCH, self._clock() - started)
            case Condemn():
                self._condemn(effect)
            case WakeAt():
                self._wake(effect.when)
            case Log():
                _log.log(LOG_LEVELS[effect.level], effect.event, **effect.fields)

    def _wake(self, when: float) -> None:
        """Sets the one timer; a later time than the one outstanding changes nothing."""
        if self._timer is not None:
            if self._wake_at <= when:
                return
            self._timer.cancel()
        self._wake_at = when
        delay_s = max(0.0, when - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(Tick())

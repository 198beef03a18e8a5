"""The scheduling core: events in, effects out; no clock, no sockets, no threads.

handle(event, now) -> effects
  requests: Submit -> global scheduler -> group scheduler -> steps -> Tokens -> End
  workers:  chip groups -> a group serves -> group scheduler; it ends -> requests move on
"""

from bisect import insort

from control_plane.config import SchedulingConfig
from control_plane.errors import (
    DeadlineExceeded,
    RequestCancelled,
    RequestError,
    ServiceUnavailable,
    WorkerFailure,
)
from control_plane.request import Request
from control_plane.scheduling.admission_rules import outgrown, queue_refusal, tokens_limit
from control_plane.scheduling.chip_groups import ChipGroups
from control_plane.scheduling.group_members import ChipGroup
from control_plane.scheduling.live_request import LiveRequest, Stage
from control_plane.scheduling.messages import (
    Accepted,
    CacheFlushed,
    Cancel,
    Effect,
    End,
    Event,
    Failed,
    FlushCache,
    Heartbeat,
    Log,
    LogLevel,
    RendezvousOpened,
    Snapshot,
    StepDone,
    Submit,
    Tick,
    WakeAt,
    WorkerAttached,
    WorkerFaulted,
    WorkerLost,
    WorkerReady,
)
from control_plane.scheduling.serving_groups import ServingGroups
from control_plane.scheduling.timers import Timers
from control_plane.scheduling.worker_table import Worker

RETRY_AFTER_S = 5.0
"""Hint for clients while no group serves."""

CONTROL_PLANE_STALLED = "control_plane.stalled"


class SchedulingCore:
    """Requests, groups and steps of the whole service.

    `handle` takes one event and returns what to do about it, in order; a request is answered by
    Accepted or Failed in the call that submits it. Never raises for what a client or a worker does.
    """

    def __init__(self, config: SchedulingConfig) -> None:
        self._config = config
        self._timers = Timers()
        self._effects: list[Effect] = []
        self._chips = ChipGroups(config, self._timers, self._emit, self)
        self._serving = ServingGroups(config, self._timers, self._emit)
        self._requests: dict[str, LiveRequest] = {}
        self._held: list[LiveRequest] = []
        self._arrivals = 0
        self._generated_tokens = 0
        self._failovers = 0
        self._wake_at: float | None = None
        self._handled_at = 0.0

    # ------------------------------------------------------------ the two doors

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes an event at `now` (seconds of a monotonic clock) and returns the effects."""
        self._notice_stall(now)
        self._route(event, now)
        for kind, name in self._timers.take_due(now):
            self._fire(kind, name, now)
        self._serving.plan_touched(now)
        self._set_wake()
        effects, self._effects = self._effects, []
        return effects

    def snapshot(self, now: float) -> Snapshot:
        """The present state; changes nothing."""
        groups = tuple(self._serving.snapshot(group) for group in self._chips.groups.values())
        return Snapshot(
            workers=self._chips.workers.snapshots(now),
            groups=groups,
            requests=len(self._requests),
            waiting=len(self._held) + sum(group.waiting for group in groups),
            running=sum(group.running for group in groups),
            generated_tokens=self._generated_tokens,
            failovers=self._failovers,
        )

    def check_integrity(self) -> None:
        """Asserts conservation of blocks, references, loads and stages."""
        self._serving.check_integrity()
        assert all(live in self._requests.values() for live in self._held)
        counted = sum(load.requests_count for load in self._serving.load.groups.values())
        assert counted == len(self._requests) - len(self._held), "every request counts once"

    # ------------------------------------------------------------ routing

    def _route(self, event: Event, now: float) -> None:
        match event:
            case StepDone():
                self._step_done(event, now)
            case Submit():
                self._submit(event.request, now)
            case End():
                self._end(event, now)
            case Cancel():
                self._fail_by_id(event.request_id, RequestCancelled(event.reason), now)
            case FlushCache():
                self._emit(CacheFlushed(self._serving.flush()))
            case Heartbeat():
                self._chips.heartbeat(event.worker_id, event.incarnation, now)
            case WorkerAttached():
                self._chips.attach(event.worker, now)
            case RendezvousOpened():
                self._chips.rendezvous(event)
            case WorkerReady():
                self._chips.ready(event, now)
            case WorkerFaulted():
                self._chips.faulted(event, now)
            case WorkerLost():
                self._chips.lost(event, now)
            case Tick():
                self._wake_at = None

    def _fire(self, kind: str, name: str, now: float) -> None:
        match kind:
            case "plan":
                self._serving.touch(name)
            case "step":
                self._step_deadline(name, now)
            case "heartbeat":
                self._chips.heartbeat_due(name, now)
            case "form":
                self._chips.formation_due(name, now)
            case "start":
                self._chips.start_overdue(name, now)
            case "gather":
                self._chips.gathered(name, now)
            case "retry":
                self._chips.retry_due(name, now)
            case "deadline":
                self._fail_by_id(name, DeadlineExceeded("the request's deadline passed"), now)
            case "recovery":
                waited_s = self._config.recovery_timeout_s
                message = f"no group came back to serve the request within {waited_s:g} s"
                self._fail_by_id(name, ServiceUnavailable(message, retry_after_s=waited_s), now)
            case _:
                raise AssertionError(kind)

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _notice_stall(self, now: float) -> None:
        """A tick that is much too late means that this process did not run (stopped, swapped out):
        signs of life and results could not be heard, so that time counts against no worker."""
        handled_at, self._handled_at = self._handled_at, now
        if self._wake_at is None or now < self._wake_at:
            return
        late_s, self._wake_at = now - self._wake_at, None
        # Half: a worker is looked at an interval before it counts as silent, see HeartbeatWatch.
        if late_s <= self._config.heartbeat_interval_s / 2:
            return
        stall_s = now - handled_at
        self._chips.forgive(stall_s, now)
        self._serving.forgive(stall_s)
        self._timers.postpone("recovery", stall_s)
        fields: dict[str, object] = {"late_s": late_s, "stall_s_max": stall_s}
        self._emit(Log(CONTROL_PLANE_STALLED, fields, LogLevel.WARNING))

    def _set_wake(self) -> None:
        """Asks for a tick only if it must come earlier than the one already asked for."""
        earliest = self._timers.earliest()
        if earliest is not None and (self._wake_at is None or earliest < self._wake_at):
            self._wake_at = earliest
            self._emit(WakeAt(earliest))

    # ------------------------------------------------------------ requests

    def _submit(self, request: Request, now: float) -> None:
        scored = request.prompt_top_tokens is not None
        assert not (scored and request.use_prefix_cache), "cached tokens would have no scores"
        assert request.request_id not in self._requests, "intake gives every id once"
        assert request.target_group is None or request.target_group in self._chips.groups
        answer = self._admissible(request)
        if isinstance(answer, RequestError):
            self._emit(Failed(request.request_id, answer))
            return
        self._arrivals += 1
        live = LiveRequest(
            request=request,
            arrival=self._arrivals,
            arrived_at=now,
            tokens_max=answer,
            token_ids=[*request.prompt_ids, *request.output_ids],
            uses_cache=self._config.prefix_cache and request.use_prefix_cache,
        )
        self._requests[live.request_id] = live
        self._emit(Accepted(live.request_id, live.tokens_max))
        if request.deadline is not None:
            self._timers.set(("deadline", live.request_id), request.deadline)
        if live.is_complete:
            self._hold(live, now)
        else:
            self._dispatch(live, now)

    def _admissible(self, request: Request) -> int | RequestError:
        """The request's limit of output tokens, or why it is refused."""
        target = request.target_group
        loads = self._serving.load.groups
        groups = [load for name, load in loads.items() if target in (None, name)]
        if not groups:
            whom = "no group serves" if target is None else f"group {target} does not serve"
            return ServiceUnavailable(f"{whom} at present", retry_after_s=RETRY_AFTER_S)
        limit = tokens_limit(request, self._serving.context_tokens, groups)
        if isinstance(limit, RequestError):
            return limit
        schedulers = self._serving.schedulers.values()
        waiting_count = len(self._held) + sum(len(s.waiting) for s in schedulers)
        return queue_refusal(request, waiting_count, loads.values(), self._config) or limit

    def _dispatch(self, live: LiveRequest, now: float) -> None:
        """Sends a request to the best group, or holds it until one serves that may hold it."""
        if self._serving.dispatch(live):
            live.held_since = None
            self._timers.clear(("recovery", live.request_id))
        elif self._may_yet_serve(live):
            self._hold(live, now)
        else:
            memory_tokens = self._serving.memory_tokens(live.request.target_group)
            self._fail(live, outgrown(live, memory_tokens), now)

    def _may_yet_serve(self, live: LiveRequest) -> bool:
        """Whether a group the request may use does not serve now, so that it may come back."""
        target = live.request.target_group
        names = self._chips.groups if target is None else [target]
        return any(name not in self._serving.schedulers for name in names)

    def _hold(self, live: LiveRequest, now: float) -> None:
        live.group_id = ""
        live.stage = Stage.WAITING
        if live.held_since is None:
            live.held_since = now
            # A request that only waits for intake's End needs no group.
            if not live.is_complete:
                when = now + self._config.recovery_timeout_s
                self._timers.set(("recovery", live.request_id), when)
        insort(self._held, live, key=lambda other: other.arrival)

    def _release_held(self, now: float) -> None:
        """A group began to serve: everyone held gets another chance, in order of arrival."""
        held, self._held = self._held, []
        for live in held:
            if live.is_complete:
                self._held.append(live)
            else:
                self._dispatch(live, now)

    def _end(self, event: End, now: float) -> None:
        live = self._requests.get(event.request_id)
        if live:
            computed = live.prompt_count + event.output_count - 1
            self._forget(live, now, valid_tokens=computed, trusted=True)

    def _fail_by_id(self, request_id: str, error: RequestError, now: float) -> None:
        live = self._requests.get(request_id)
        if live:
            self._fail(live, error, now)

    def _fail(
        self, live: LiveRequest, error: RequestError, now: float, *, trusted: bool = True
    ) -> None:
        self._forget(live, now, valid_tokens=None, trusted=trusted)
        self._emit(Failed(live.request_id, error))

    def _forget(
        self, live: LiveRequest, now: float, *, valid_tokens: int | None, trusted: bool
    ) -> None:
        """The one way out for every request."""
        del self._requests[live.request_id]
        self._timers.clear(("deadline", live.request_id))
        self._timers.clear(("recovery", live.request_id))
        scheduler = self._serving.schedulers.get(live.group_id)
        if scheduler:
            scheduler.remove(live, now, valid_tokens=valid_tokens, trusted=trusted)
            self._serving.touch(live.group_id)
            return
        if live in self._held:
            self._held.remove(live)
        live.stage = Stage.OVER

    # ------------------------------------------------------------ steps

    def _step_done(self, event: StepDone, now: float) -> None:
        group = self._chips.serving_rank(
            event.worker_id, event.incarnation, event.group_id, event.epoch
        )
        if group is None:
            return
        scheduler = self._serving.schedulers[group.group_id]
        if not scheduler.in_flight.expects(event.step_id, event.results, event.prompt_scores):
            reason = f"result of step {event.step_id} does not match the steps on their way"
            self._chips.end_epoch(group, reason, now)
            return
        self._chips.step_finished(group)
        tokens, failed = scheduler.accept(event, now)
        self._serving.touch(group.group_id)
        if tokens.deltas or tokens.prompt_deltas:
            self._generated_tokens += sum(len(delta.token_ids) for delta in tokens.deltas)
            self._emit(tokens)
        for live in failed:
            error = WorkerFailure(
                f"the model's output for this request was not finite on group {group.group_id}"
            )
            self._fail(live, error, now, trusted=False)

    def _step_deadline(self, group_id: str, now: float) -> None:
        scheduler = self._serving.schedulers.get(group_id)
        if scheduler is None or not scheduler.in_flight:
            return
        when = scheduler.in_flight.started_at + self._config.step_deadline_s
        if when > now:
            self._timers.set(("step", group_id), when)
        else:
            self._chips.step_overdue(group_id, now)

    # ------------------------------------------------------------ groups come and go

    def group_serves(self, group: ChipGroup, ranks: list[Worker], now: float) -> None:
        """A group is ready: it gets its share of the work."""
        self._serving.open(group, ranks)
        self._release_held(now)

    def group_ended(self, group: ChipGroup, now: float) -> None:
        """A group's epoch is over: its requests go to the front of the queue, elsewhere or here."""
        orphans = [live for live in self._requests.values() if live.group_id == group.group_id]
        orphans.sort(key=lambda live: live.arrival)
        self._serving.close(group.group_id, orphans)
        for live in orphans:
            self._survive(live, now)

    def _survive(self, live: LiveRequest, now: float) -> None:
        """A request lost its group: it starts over from its committed tokens."""
        was_running = live.placement is not None
        live.placement = None
        live.match = None
        live.front = True
        live.group_id = ""
        if was_running and not live.is_complete:
            if live.alone:
                error = WorkerFailure(
                    f"a group failed {live.group_deaths + 1} times while it computed this request, "
                    f"the last time with nothing else"
                )
                self._fail(live, error, now)
                return
            live.failovers += 1
            self._failovers += 1
            live.group_deaths += 1
            live.alone = live.group_deaths >= self._config.group_deaths_max
        if live.is_complete:
            self._hold(live, now)
        else:
            self._dispatch(live, now)

"""Carries the scheduling core's effects to the workers: knows which process serves which name.

effect --Dispatcher--> bytes --StepStream--> worker
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import structlog

from control_plane.dispatch import wire
from control_plane.dispatch.step_stream import StepStream
from control_plane.dispatch.wire import GroupSettings, Place
from control_plane.metrics import DispatchCounters
from control_plane.scheduling.messages import (
    DropWorker,
    Event,
    FormGroup,
    Heartbeat,
    LossKind,
    ResetWorker,
    SendRendezvous,
    SendStep,
    WorkerAttached,
    WorkerInfo,
)

WORKER_ATTACHED = "worker.attached"
WORKER_DROPPED = "worker.dropped"
TERM_RAISED = "term.raised"

WELCOMED_MAX = 4096
"""Forgetting a name costs no more than a term raised in vain, should its worker come again."""

DispatchEffect = FormGroup | SendRendezvous | SendStep | ResetWorker | DropWorker

_log = structlog.get_logger()


@dataclass
class Dispatcher:
    """The attached workers, one stream a name, all of one term.

    post: receives the events; must not raise. term: starts as the start second of the process, so
    that a later control plane outranks an earlier one even if no worker tells them apart.
    """

    settings: GroupSettings
    term: int
    post: Callable[[Event], None]
    counters: DispatchCounters
    _streams: dict[str, StepStream] = field(default_factory=dict, init=False)
    _welcomed: dict[str, int] = field(default_factory=dict, init=False)
    """Incarnation each name was last welcomed as; the latest `WELCOMED_MAX` names."""

    # ------------------------------------------------------------ effects

    def carry_out(self, effect: DispatchEffect) -> None:
        """Sends what the effect says; a worker that is gone meanwhile is skipped."""
        match effect:
            case SendStep():
                self._send_step(effect)
            case FormGroup():
                self._form_group(effect)
            case SendRendezvous():
                stream = self._find(effect.worker_id, effect.incarnation)
                if stream is not None:
                    stream.send(wire.encode_rendezvous(effect.epoch, effect.address, self.term))
            case ResetWorker():
                stream = self._find(effect.worker_id, effect.incarnation)
                if stream is not None:
                    stream.place = None
                    stream.send(wire.encode_reset(effect.epoch, effect.reason, self.term))
            case DropWorker():
                stream = self._find(effect.worker_id, effect.incarnation)
                if stream is not None:
                    _log.warning(WORKER_DROPPED, worker=effect.worker_id, reason=effect.reason)
                    self._close(stream, grpc.StatusCode.ABORTED, effect.reason)

    def shut_down_workers(self, reason: str) -> None:
        """Asks every attached worker to leave."""
        for stream in self._streams.values():
            stream.send(wire.encode_shutdown(reason, self.term))

    @property
    def attached_count(self) -> int:
        """Workers with an open stream."""
        return len(self._streams)

    def _send_step(self, effect: SendStep) -> None:
        message = wire.encode_step(effect.plan, self.term)
        self.counters.steps_sent += 1
        self.counters.step_bytes += len(message)
        for worker_id in effect.worker_ids:
            stream = self._streams.get(worker_id)
            # A process that replaced a rank is in another epoch or in none: not its step.
            if stream and stream.place and stream.place.epoch == effect.plan.epoch:
                stream.send(message)

    def _form_group(self, effect: FormGroup) -> None:
        stream = self._find(effect.worker_id, effect.incarnation)
        if stream is not None:
            stream.place = Place(effect.group_id, effect.epoch, effect.rank)
            stream.send(wire.encode_form_group(effect, self.settings, stream.worker, stream.term))

    def _find(self, worker_id: str, incarnation: int) -> StepStream | None:
        stream = self._streams.get(worker_id)
        return stream if stream and stream.worker.incarnation == incarnation else None

    # ------------------------------------------------------------ streams

    def attach(self, worker: WorkerInfo) -> StepStream:
        """Takes a worker in and gives it its stream; an older process of the name is closed."""
        self._raise_term_above(worker)
        older = self._streams.get(worker.worker_id)
        if older is not None:
            self._close(
                older,
                grpc.StatusCode.ABORTED,
                f"SUPERSEDED: worker {worker.worker_id!r} attached as process {worker.pid}",
            )
        stream = StepStream(worker, self.term, self.post, self.counters)
        self._streams[worker.worker_id] = stream
        self._welcomed.pop(worker.worker_id, None)
        self._welcomed[worker.worker_id] = worker.incarnation
        if len(self._welcomed) > WELCOMED_MAX:
            del self._welcomed[next(iter(self._welcomed))]
        self.counters.streams_opened += 1
        return stream

    def announce(self, stream: StepStream) -> None:
        """Tells the core of a worker, once Welcome is written and messages may follow."""
        worker = stream.worker
        _log.info(
            WORKER_ATTACHED,
            worker=worker.worker_id,
            pid=worker.pid,
            backend=worker.backend,
            device=worker.device,
            dtype=worker.dtype,
            unavailable_reason=worker.unavailable_reason,
        )
        self.post(WorkerAttached(worker))

    def detach(self, stream: StepStream) -> None:
        """Forgets an ended stream; a newer one of the same name stays."""
        if self._streams.get(stream.worker.worker_id) is stream:
            del self._streams[stream.worker.worker_id]

    def heartbeat(self, worker_id: str, incarnation: int, term: int) -> bool:
        """Passes a sign of life on. False: the process must register again."""
        if term != self.term or self._find(worker_id, incarnation) is None:
            return False
        self.post(Heartbeat(worker_id, incarnation))
        return True

    def _close(self, stream: StepStream, status: grpc.StatusCode, reason: str) -> None:
        """Ends a stream and forgets it at once, so that its loss precedes what comes next."""
        self.detach(stream)
        stream.close(status, reason)
        stream.report_lost(LossKind.STREAM, reason)

    def _raise_term_above(self, worker: WorkerInfo) -> None:
        """Outranks a control plane of a higher term that this worker served before.

        That happens when a clock was set back. Workers already here follow the lower term, so they
        are sent away to register again: their epochs end, their weights stay.
        """
        known = self._welcomed.get(worker.worker_id) == worker.incarnation
        if worker.term_highest < self.term or (known and worker.term_highest == self.term):
            return
        self.term = worker.term_highest + 1
        self.counters.terms_raised += 1
        _log.warning(TERM_RAISED, term=self.term, worker=worker.worker_id)
        for stream in list(self._streams.values()):
            self._close(stream, grpc.StatusCode.UNAVAILABLE, f"the term rose to {self.term}")

"""Signs of life of the workers: when to look at one, and whether it was silent for too long."""

from control_plane.config import SchedulingConfig
from control_plane.scheduling.timers import Timers
from control_plane.scheduling.worker_table import Worker


class HeartbeatWatch:
    """Heartbeats do not move a worker's timer: `is_silent` looks at the last one when it fires.

    It fires an interval before the worker counts as silent, and then once more: if this process
    stood still meanwhile, the first look is late by so much that the core notices. A worker that
    loads may be silent for longer but is looked at as often, so that a standstill shows then too.
    """

    def __init__(self, config: SchedulingConfig, timers: Timers) -> None:
        self._config = config
        self._timers = timers

    def arm(self, worker: Worker, now: float) -> None:
        """Sets the next look at a worker; to be called when its state changes."""
        when = min(self._silent_at(worker), now + self._config.heartbeat_timeout_s)
        self._timers.set(("heartbeat", worker.worker_id), when - self._config.heartbeat_interval_s)

    def is_silent(self, worker: Worker, now: float) -> bool:
        """Whether a worker whose timer fired is to be given up; if not, the timer is set again."""
        # Compared as it was computed: a rounded difference could set the same time again for ever.
        silent_at = self._silent_at(worker)
        if now < silent_at - self._config.heartbeat_interval_s:
            self.arm(worker, now)
        elif now < silent_at:
            self._timers.set(("heartbeat", worker.worker_id), silent_at)
        else:
            return True
        return False

    def _silent_at(self, worker: Worker) -> float:
        if worker.is_forming:
            return worker.heartbeat_at + self._config.formation_heartbeat_timeout_s
        return worker.heartbeat_at + self._config.heartbeat_timeout_s

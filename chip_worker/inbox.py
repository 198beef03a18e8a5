"""Commands on their way from the connection to the compute thread, fenced by term and epoch.

connection thread: offer, end_epoch          compute thread: take, finish
"""

import queue
import threading
from collections.abc import Callable
from time import monotonic

import structlog

from chip_worker.batch import Command, FormGroup, Rendezvous, ResetEpoch, Shutdown, Step
from chip_worker.errors import WorkerError

COMMANDS_MAX = 256
"""Far above what a control plane that keeps to the step credit has under way."""

COMMAND_STALE = "worker.command_stale"

_log = structlog.get_logger()


class InboxFull(WorkerError):
    """The control plane sent far more than the step credit allows."""


class Inbox:
    """Bounded queue to the compute thread.

    Ending an epoch is the one thing that overtakes: what waits is dropped, and `interrupt` is
    called with the ended epoch so that a hung collective ends. One thread offers, one takes.
    """

    def __init__(
        self,
        interrupt: Callable[[FormGroup], None],
        commands_max: int = COMMANDS_MAX,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._interrupt = interrupt
        self._commands_max = commands_max
        self._clock = clock
        self._taken_at = 0.0
        # SimpleQueue, because its put may be called from a signal handler while get waits.
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._progress = threading.Lock()
        self._busy: Command | None = None
        self._step_started = 0
        self._step_done = 0
        self._term = 0
        self._form: FormGroup | None = None

    # ------------------------------------------------------------ connection thread

    @property
    def form(self) -> FormGroup | None:
        """The group and epoch the worker is in or on its way to, as the connection sees it."""
        return self._form

    def begin_term(self, term: int) -> None:
        """A stream of this term begins; `end_epoch` has ended what was before."""
        assert self._form is None, "the epoch before was not ended"
        self._term = term

    def offer(self, command: Command) -> None:
        """Queues a command if it is of the present term and epoch, else drops it.

        Raises InboxFull.
        """
        if isinstance(command, Shutdown):
            self.put_shutdown(command.reason)
            return
        if command.term != self._term or not self._fits_epoch(command):
            _log.warning(
                COMMAND_STALE,
                command=type(command).__name__,
                term=command.term,
                epoch=command.epoch,
                current_term=self._term,
                current_epoch=self._form.epoch if self._form else 0,
            )
            return
        if isinstance(command, ResetEpoch):
            self.end_epoch(command.reason)
            return
        if isinstance(command, FormGroup):
            # A new epoch without a reset in between: the old one is over all the same.
            self.end_epoch(f"epoch {command.epoch} of group {command.group_id} begins")
            self._form = command
        if self._commands.qsize() >= self._commands_max:
            raise InboxFull(f"{self._commands_max} commands wait for the compute thread")
        self._commands.put(command)

    def end_epoch(self, reason: str) -> None:
        """Ends the present epoch, if there is one."""
        form, self._form = self._form, None
        if form is None:
            return
        self._drop_waiting()
        self._interrupt(form)
        self._commands.put(ResetEpoch(form.term, form.epoch, reason))

    def put_shutdown(self, reason: str) -> None:
        """Lets the compute loop end after what it has begun; also from a signal handler."""
        self._commands.put(Shutdown(reason))

    def _fits_epoch(self, command: FormGroup | Rendezvous | Step | ResetEpoch) -> bool:
        if isinstance(command, FormGroup):
            return self._form is None or command.epoch != self._form.epoch
        return self._form is not None and command.epoch == self._form.epoch

    def _drop_waiting(self) -> None:
        kept = []
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, Shutdown):
                kept.append(command)
        for command in kept:
            self._commands.put(command)

    # ------------------------------------------------------------ compute thread

    def take(self) -> Command:
        """The next command, waited for; `finish` must follow before the next `take`."""
        command = self._commands.get()
        with self._progress:
            self._busy = command
            self._taken_at = self._clock()
            if isinstance(command, Step):
                self._step_started = command.step_id
            elif isinstance(command, FormGroup):
                self._step_started = self._step_done = 0
        return command

    def finish(self) -> None:
        """The command taken last is done."""
        with self._progress:
            if isinstance(self._busy, Step):
                self._step_done = self._busy.step_id
            self._busy = None

    # ------------------------------------------------------------ any thread

    @property
    def busy_with(self) -> Command | None:
        """What the compute thread works on; None while it waits."""
        with self._progress:
            return self._busy

    @property
    def busy_s(self) -> float:
        """Seconds since the compute thread took its command; 0 while it waits."""
        with self._progress:
            return 0.0 if self._busy is None else self._clock() - self._taken_at

    @property
    def steps(self) -> tuple[int, int]:
        """(last step started, last step done) of the epoch, for heartbeats."""
        with self._progress:
            return self._step_started, self._step_done

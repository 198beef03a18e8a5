"""The worker's link to the control plane: a thread with an event loop that keeps a stream open.

    control plane ==Attach==> PlaneStream --offer--> Inbox  --take-->   compute thread
                  <==Attach== PlaneStream <--put--  Outbox <--report--  (session)

A stream that ends for whatever reason ends the epoch; the worker keeps its weights and registers
again, ever more slowly while that fails.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable

import anyio
import structlog
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    wait_random_exponential,
)

from chip_worker.batch import Command, Fault, FaultKind, FormGroup, Ready, Report
from chip_worker.config import WorkerConfig
from chip_worker.errors import Unreachable
from chip_worker.exit_code import ExitCode
from chip_worker.inbox import Inbox
from chip_worker.plane_address import dialled_address
from chip_worker.plane_stream import GivenUp, PlaneStream, Refused, StreamEnded
from chip_worker.status_file import CONNECTING, FAILED, FORMING, IDLE, LEAVING, SERVING, StatusFile
from chip_worker.wire import Identity

STREAM_GOOD_S = 5.0
"""A stream that lived so long proves the control plane well: the next pauses start small again."""
CLOSE_TIMEOUT_S = 4.0

REGISTERED = "worker.registered"
DISCONNECTED = "worker.disconnected"
REFUSED = "worker.refused"
HUNG = "worker.hung"
STATUS_UNWRITTEN = "worker.status_unwritten"

_log = structlog.get_logger()


class Connection:
    """Owns the connection thread and the inbox the compute thread takes its commands from.

    `start` and `close` are for the main thread, `report` for any. exit_process: ends the process at
    once; only for a compute thread that does not come back. `on_fault`, which may be set before the
    start, is called first then, on a thread of its own.
    """

    def __init__(
        self,
        config: WorkerConfig,
        status: StatusFile,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self.inbox = Inbox(self._interrupt)
        self.exit_code = ExitCode.LEFT
        """What the process should exit with once the compute loop has ended."""
        self._config = config
        self._status = status
        self._exit_process = exit_process
        self.on_fault: Callable[[], None] = lambda: None
        self._abort: Callable[[FormGroup], None] = lambda _ended: None
        self._is_probing: Callable[[], bool] = lambda: False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scope: anyio.CancelScope | None = None
        self._stream: PlaneStream | None = None
        self._ready_epoch = 0
        self._closing = False
        self._term_highest = 0

    # ------------------------------------------------------------ other threads

    def start(
        self,
        identity: Identity,
        abort: Callable[[FormGroup], None],
        is_probing: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts the thread. abort: makes the compute thread leave what hangs in that epoch.

        is_probing: whether it is in the first collective of the epoch, which has its own deadline.
        """
        self._abort = abort
        self._is_probing = is_probing
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run_thread, args=(identity, started), name="connection", daemon=True
        )
        self._thread.start()
        started.wait()

    def report(self, report: Report) -> None:
        """Sends a report if its epoch still lasts or the process ends; returns at once."""
        if isinstance(report, Fault) and report.exiting:
            model_failed = report.kind is FaultKind.MODEL
            self.exit_code = ExitCode.MODEL_FAILED if model_failed else ExitCode.DEVICE_LOST
            self.inbox.put_shutdown(f"failed for good: {report.message}")
        self._call_soon(lambda: self._send(report))

    def close(self, reason: str) -> None:
        """Says Goodbye if there is somebody to say it to, and ends the thread."""
        self._call_soon(lambda: self._leave(reason))
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _call_soon(self, function: Callable[[], None]) -> None:
        # The loop may close at any moment: then nobody is left to tell.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    # ------------------------------------------------------------ connection thread

    def _run_thread(self, identity: Identity, started: threading.Event) -> None:
        try:
            asyncio.run(self._run(identity, started))
        except BaseException:
            # The compute thread would wait for ever for a command.
            self.exit_code = ExitCode.FAILED
            self.inbox.put_shutdown("the connection failed")
            raise
        finally:
            started.set()

    async def _run(self, identity: Identity, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        with anyio.CancelScope() as self._scope:
            started.set()
            try:
                while not self._closing:
                    await self._stay_registered(identity)
            except Refused as error:
                # Of a process that was about to exit anyway the first reason counts.
                if self.exit_code is ExitCode.LEFT:
                    given_up = isinstance(error, GivenUp)
                    self.exit_code = ExitCode.GIVEN_UP if given_up else ExitCode.REFUSED
                _log.error(REFUSED, error=str(error))
                self.inbox.put_shutdown(str(error))
        self._write_status()

    async def _stay_registered(self, identity: Identity) -> None:
        """Returns after a stream that lived for a while, so that the pauses start small again."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(Unreachable),
            wait=wait_random_exponential(
                multiplier=2 * self._config.connect_backoff_first_s,
                max=self._config.connect_backoff_max_s,
                min=self._config.connect_backoff_first_s,
            ),
            before_sleep=self._log_disconnected,
        )
        async for attempt in retrying:
            with attempt:
                await self._serve_once(identity)

    async def _serve_once(self, identity: Identity) -> None:
        self._write_status()
        address = await dialled_address(self._config.control_plane)
        stream = PlaneStream(self._config, address, identity, self.inbox)
        began_at = anyio.current_time()
        try:
            await stream.attach(self._term_highest)
            self._term_highest = stream.term
            self.inbox.begin_term(stream.term)
            self._stream = stream
            _log.info(REGISTERED, control_plane=address, term=stream.term)
            self._write_status()
            await stream.serve(self._write_status)
        except StreamEnded as error:
            if not self._closing and anyio.current_time() - began_at < STREAM_GOOD_S:
                raise
            _log.warning(DISCONNECTED, error=str(error))
        finally:
            self._stream = None
            self.inbox.end_epoch("the stream to the control plane ended")
            with anyio.CancelScope(shield=True):
                await stream.close()

    def _log_disconnected(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        _log.warning(DISCONNECTED, error=str(error), attempt=state.attempt_number)

    def _send(self, report: Report) -> None:
        stream, form = self._stream, self.inbox.form
        if stream is None or report.term != stream.term:
            return
        # A fault that ends the process is told whatever became of its epoch.
        final = isinstance(report, Fault) and report.exiting
        if final or (form is not None and report.epoch == form.epoch):
            stream.outbox.put(report)
            if isinstance(report, Ready):
                self._ready_epoch = report.epoch
                self._write_status()

    def _leave(self, reason: str) -> None:
        self._closing = True
        if self._stream is None:
            assert self._scope is not None
            self._scope.cancel()
        else:
            self._stream.outbox.put_goodbye(reason)

    def _interrupt(self, ended: FormGroup) -> None:
        """Called when an epoch ends; watches that the compute thread comes back from it."""
        probing = self._is_probing()
        self._abort(ended)
        forming = self._ready_epoch != ended.epoch
        # The same number may come again in a later term.
        self._ready_epoch = 0
        command = self.inbox.busy_with
        if command is None:
            return
        patience_s = ended.step_deadline_s
        if probing:
            patience_s = ended.probe_deadline_s
        elif forming:
            # Loading weights cannot be interrupted, but has its own deadline.
            patience_s = max(patience_s, ended.deadline_s - self.inbox.busy_s)

        def exit_if_hung() -> None:
            if self.inbox.busy_with is command:
                self._exit_hung(ended, command, patience_s)

        # A timer of its own, because the event loop may end before it is due.
        timer = threading.Timer(patience_s, exit_if_hung)
        timer.daemon = True
        timer.start()

    def _exit_hung(self, ended: FormGroup, command: Command, patience_s: float) -> None:
        """Ends the process after telling that its chip is to blame; on the timer's thread."""
        name = type(command).__name__
        message = f"{name} did not come back for {patience_s:g} s after its epoch ended"
        _log.critical(HUNG, command=name, patience_s=patience_s)
        self.exit_code = ExitCode.HUNG
        fault = Fault(
            term=ended.term,
            epoch=ended.epoch,
            step_id=self.inbox.steps[0],
            kind=FaultKind.DEVICE,
            message=message,
            exiting=True,
        )
        try:
            self.on_fault()
            self._call_soon(lambda: self._send(fault))
            self.close(message)
        finally:
            self._exit_process(ExitCode.HUNG)

    def _write_status(self) -> None:
        form = self.inbox.form
        if self.exit_code not in (ExitCode.LEFT, ExitCode.DEVICE_LOST):
            state = FAILED
        elif self._closing:
            state = LEAVING
        elif self._stream is None:
            state = CONNECTING
        elif form is None:
            state = IDLE
        else:
            state = SERVING if form.epoch == self._ready_epoch else FORMING
        try:
            self._status.write(state, form.group_id if form else "", form.epoch if form else 0)
        except OSError as error:
            _log.warning(STATUS_UNWRITTEN, error=str(error))

"""A collective under way in gloo: waits for its messages and translates gloo's errors."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from typing_extensions import override

from backends.communicator import Work
from backends.errors import CommunicatorError, CommunicatorTimeout, PeerLost


@contextmanager
def translate_gloo_errors(doing: str) -> Iterator[None]:
    """The one place where gloo's RuntimeErrors, told apart only by their text, become ours."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise CommunicatorTimeout(f"{doing}: no answer in time: {text}") from error
        raise PeerLost(f"{doing}: another rank is gone: {text}") from error


class GlooWork(Work):
    """Messages on their way, and what is to be done with them once they are there.

    It must be done within `deadline_s` of now; `on_failure` closes the communicator.
    """

    def __init__(
        self,
        name: str,
        messages: Sequence[dist.Work],
        finish: Callable[[], None],
        deadline_s: float,
        on_failure: Callable[[], None],
    ) -> None:
        self._name = name
        self._messages = messages
        self._finish = finish
        self._deadline = time.monotonic() + deadline_s
        self._on_failure = on_failure
        self._one_waiter = threading.Lock()
        self._done = threading.Event()
        self._error: CommunicatorError | None = None
        self._watcher: threading.Thread | None = None

    @override
    def wait_stream(self) -> None:
        """The host itself is what works after the collective, so it waits."""
        self.wait()

    @override
    def wait(self, timeout_s: float | None = None) -> None:
        """After a timeout, as after any failure, the communicator is broken."""
        deadline = self._deadline
        if timeout_s is not None:
            deadline = min(deadline, time.monotonic() + timeout_s)
        left_s = max(0.0, deadline - time.monotonic())
        if not self._one_waiter.acquire(timeout=left_s):
            self._on_failure()
            raise CommunicatorTimeout(f"{self._name}: not done after {left_s:.3f} s")
        try:
            if not self._done.is_set():
                self._complete(deadline)
        finally:
            self._one_waiter.release()
        if self._error is not None:
            raise self._error

    def _complete(self, deadline: float) -> None:
        try:
            with translate_gloo_errors(self._name):
                for message in self._messages:
                    left_s = max(0.001, deadline - time.monotonic())
                    message.wait(timedelta(seconds=left_s))
            self._finish()
        except CommunicatorError as error:
            self._error = error
            # Closing our connections tells the other ranks, which may not see the lost one.
            self._on_failure()
        self._messages = ()
        self._done.set()

    @override
    def done(self) -> bool:
        """gloo's messages finish only in a wait, so the first question starts a waiting thread."""
        if not self._done.is_set() and self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="gloo-watcher", daemon=True)
            self._watcher.start()
        return self._done.is_set()

    def _watch(self) -> None:
        with self._one_waiter:
            if not self._done.is_set():
                self._complete(self._deadline)

    @override
    def exception(self) -> CommunicatorError | None:
        return self._error if self.done() else None

"""Joining a group: waits for the other ranks on a thread of its own, so that it can be given up.

Backends cannot be interrupted while they wait for ranks that may never come. The compute thread
waits here instead; an abandoned attempt ends at its own deadline and closes what it got.
"""

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from threading import Thread

from backends.errors import CommunicatorError
from backends.interface import Communicator


class Joining:
    """One attempt to create a communicator."""

    def __init__(self, create: Callable[[], Communicator]) -> None:
        """Starts at once."""
        self._create = create
        # Stays pending until the outcome is known, and can be cancelled until then.
        self._outcome: Future[Communicator] = Future()
        Thread(target=self._run, name="joining", daemon=True).start()

    def wait(self) -> Communicator:
        """The communicator, which the caller closes. Raises CommunicatorError if given up."""
        try:
            return self._outcome.result()
        except CancelledError:
            raise CommunicatorError("given up while the ranks were joining") from None

    def give_up(self) -> None:
        """Ends the wait, if it has not ended; from any thread."""
        self._outcome.cancel()

    def _run(self) -> None:
        try:
            communicator = self._create()
        except Exception as error:  # noqa: BLE001 - raised again by wait
            if self._outcome.set_running_or_notify_cancel():
                self._outcome.set_exception(error)
            return
        if self._outcome.set_running_or_notify_cancel():
            self._outcome.set_result(communicator)
        else:
            communicator.close()

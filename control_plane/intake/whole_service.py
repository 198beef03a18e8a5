"""What intake asks and tells the rest of the service, beside the core's events and effects.

Intake in the control plane's own process has a LocalService; one in a process of its own asks over
its stream (see control_plane/frontends/remote_core.py).
"""

from collections.abc import Callable
from typing import Protocol

from typing_extensions import override

from control_plane.intake import admin_wire
from control_plane.intake.release import VERSION
from control_plane.scheduling.messages import Snapshot
from protos import admin_pb2


class WholeService(Protocol):
    """The service an intake is part of. What waits raises ServiceUnavailable if nobody answers."""

    async def status(self, intake_count: int) -> admin_pb2.GetStatusResponse:
        """The whole state. intake_count: calls in progress at this intake."""

    async def metrics_text(self) -> tuple[bytes, str]:
        """The answer to a scrape and its content type."""

    async def cancel_elsewhere(self, request_id: str, reason: str) -> bool:
        """Ends a call at another intake; False if none of this id is in progress there."""

    def call_opened(self, request_id: str) -> None:
        """A call of this id is in progress here, until `call_closed`."""

    def call_closed(self, request_id: str) -> None:
        """Its client has read or left."""


class LocalService(WholeService):
    """Of an intake that is the only one, in the core's process.

    snapshot: the core's present state. term: the control plane's. expose: a scrape's answer and its
    content type.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        term: Callable[[], int],
        expose: Callable[[], tuple[bytes, str]],
    ) -> None:
        self._snapshot = snapshot
        self._term = term
        self._expose = expose

    @override
    async def status(self, intake_count: int) -> admin_pb2.GetStatusResponse:
        return admin_wire.status_response(
            self._snapshot(), intake_count=intake_count, term=self._term(), version=VERSION
        )

    @override
    async def metrics_text(self) -> tuple[bytes, str]:
        return self._expose()

    @override
    async def cancel_elsewhere(self, request_id: str, reason: str) -> bool:
        return False

    @override
    def call_opened(self, request_id: str) -> None:
        pass

    @override
    def call_closed(self, request_id: str) -> None:
        pass

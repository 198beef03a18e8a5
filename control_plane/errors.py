"""Errors of the control plane, one tree; the servers translate them at their edge.

ControlPlaneError
├── RequestError                 one request cannot be served as asked
│   ├── InvalidRequest           400, INVALID_ARGUMENT: names the field, the limit and the remedy
│   ├── Unauthenticated          401, UNAUTHENTICATED: no valid API key
│   ├── ModelNotFound            404, NOT_FOUND
│   ├── QueueFull                429, RESOURCE_EXHAUSTED: comes with a retry hint
│   ├── ServiceUnavailable       503, UNAVAILABLE: no group serves, or draining; retry hint
│   ├── RequestCancelled         499, CANCELLED: the client or an operator cancelled it
│   ├── DeadlineExceeded         504, DEADLINE_EXCEEDED
│   └── WorkerFailure            500, INTERNAL: a worker failed this request for good
├── ConfigurationError           the process cannot start as configured
└── ProtocolError                a peer broke the protocol; its stream ends
"""

from typing import ClassVar

RETRY_AFTER_S = 1.0
"""The hint where nothing tells when trying again may help."""


class ControlPlaneError(Exception):
    """Something the control plane could not do."""


class RequestError(ControlPlaneError):
    """One request cannot be served as asked.

    reason: a stable label for programs and metrics. field: the request field at fault, if one is.
    retry_after_s: when trying again may help; None means it does not.
    """

    reason: ClassVar[str] = "REQUEST_FAILED"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """The request asks for something no retry can make possible."""

    reason = "INVALID_REQUEST"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"


class Unauthenticated(RequestError):
    """The service asks for an API key, and none or a wrong one came."""

    reason = "INVALID_API_KEY"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class ModelNotFound(RequestError):
    """The named model is not served here."""

    reason = "MODEL_NOT_FOUND"
    http_status = 404
    grpc_status = "NOT_FOUND"


class QueueFull(RequestError):
    """The waiting queue is full."""

    reason = "QUEUE_FULL"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class ServiceUnavailable(RequestError):
    """No group serves, or the service is draining."""

    reason = "UNAVAILABLE"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class RequestCancelled(RequestError):
    """Cancelled by the client or an operator."""

    reason = "CANCELLED"
    http_status = 499
    grpc_status = "CANCELLED"


class DeadlineExceeded(RequestError):
    """The request's deadline passed."""

    reason = "DEADLINE_EXCEEDED"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class WorkerFailure(RequestError):
    """A worker failed this request for good."""

    reason = "WORKER_FAILURE"
    http_status = 500
    grpc_status = "INTERNAL"


class ConfigurationError(ControlPlaneError):
    """The process cannot start as configured."""


class ProtocolError(ControlPlaneError):
    """A peer broke the protocol."""


REQUEST_ERRORS: tuple[type[RequestError], ...] = (RequestError, *RequestError.__subclasses__())
"""Every kind, each with a reason of its own."""

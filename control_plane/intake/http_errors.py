"""RequestErrors as OpenAI-shaped JSON: the one place where errors become HTTP statuses."""

import math

from starlette.responses import Response

from control_plane.errors import RequestError
from control_plane.intake.http_json import dump

TYPES = {429: "rate_limit_error", 499: "request_cancelled"}


def error_object(error: RequestError) -> dict[str, object]:
    """{"error": ...} as OpenAI clients read it, in a body or in an event of a stream."""
    return _object(error.http_status, error.message, error.field, error.reason)


def error_response(error: RequestError) -> Response:
    """The error as a whole response, with Retry-After where trying again may help."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    return json_response(error_object(error), error.http_status, headers)


def plain_error_response(
    status: int, message: str, code: str, field: str | None = None
) -> Response:
    """An error of HTTP itself: no such path, body too large."""
    return json_response(_object(status, message, field, code), status)


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Any JSON answer."""
    return Response(dump(content), status, headers, media_type="application/json")


def _object(status: int, message: str, field: str | None, code: str) -> dict[str, object]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}

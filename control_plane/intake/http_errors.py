"""RequestErrors as OpenAI-shaped JSON: the one place where errors become HTTP statuses."""

import math
from collections.abc import Mapping

from starlette.responses import Response

from control_plane.errors import RETRY_AFTER_S, RequestError
from control_plane.intake.http_json import dump

TYPES = {401: "authentication_error", 429: "rate_limit_error", 499: "request_cancelled"}
RETRY_STATUSES = (429, 503)

OWN_NAMES: Mapping[str, str] = {}
"""For requests whose fields have the names that errors use."""


def error_object(
    error: RequestError, field_names: Mapping[str, str] = OWN_NAMES
) -> dict[str, object]:
    """{"error": ...} as OpenAI clients read it, in a body or in an event of a stream.

    field_names: what the client called a field, by the name the error has for it.
    """
    field, message = error.field, error.message
    if field is not None and field in field_names:
        own_name = field_names[field]
        if message.startswith(f"{field}:"):
            message = own_name + message[len(field) :]
        field = own_name
    return _object(error.http_status, message, field, error.reason)


def error_response(error: RequestError, field_names: Mapping[str, str] = OWN_NAMES) -> Response:
    """The error as a whole response, with Retry-After where trying again may help."""
    headers = {}
    if error.retry_after_s is not None or error.http_status in RETRY_STATUSES:
        retry_after_s = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_object(error, field_names), error.http_status, headers)


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

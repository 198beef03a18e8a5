"""RequestErrors as rich gRPC statuses: the one place where errors become gRPC's."""

import asyncio
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from control_plane.errors import RequestError

ERROR_DOMAIN = "polychip"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> NoReturn:
    """Ends the call; raises, as gRPC's own abort does."""
    status = rpc_status.to_status(rich_status(error))
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.InternalError as lost:
        # The client left before the status reached it. gRPC would log that as a failure of ours.
        raise asyncio.CancelledError("the client is gone") from lost
    raise AssertionError("abort returned")


def rich_status(error: RequestError) -> Status:
    """The error with google.rpc details: its reason, the field at fault, when to try again."""
    details: list[Message] = [ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)]
    if error.field is not None:
        violation = BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        details.append(RetryInfo(retry_delay=delay))
    status = Status(code=Code.Value(error.grpc_status), message=error.message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status

"""Ends a gRPC call with a RequestError: the one place where errors become gRPC statuses."""

from typing import Any, NoReturn

import grpc
from grpc_status import rpc_status

from control_plane.errors import RequestError
from control_plane.intake.wire import rich_status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> NoReturn:
    """Raises, as gRPC's own abort does."""
    status = rpc_status.to_status(rich_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)

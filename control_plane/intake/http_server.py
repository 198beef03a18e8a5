"""The listening HTTP server: uvicorn inside the running loop, without its signal handling."""

import math
import socket
import sys

import anyio
import uvicorn
from anyio.abc import TaskGroup
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from control_plane.config import ControlPlaneConfig
from control_plane.errors import ConfigurationError

KEEP_ALIVE_S = 75
"""Longer than most clients and proxies keep an idle connection, so that they close it first."""
TICK_S = 1.0
"""How often the `Date` header is set, to the second."""
SOCKET_OPTION_MAX = (1 << 31) - 1


class HttpConnection(H11Protocol):
    """uvicorn's, but it lets go of a client that left in the midst of an answer.

    Else the transport waits until its buffer is sent, which such a client may never take, and
    nobody hears that the request is over.
    """

    @override
    def eof_received(self) -> None:
        # None before the first request, though its type says otherwise.
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            self.transport.abort()


class HttpServer:
    """Serves one application from `start` to `stop`."""

    def __init__(self, config: ControlPlaneConfig, app: ASGIApp) -> None:
        self._host = config.host
        self._port = config.http_port
        self._shared = config.frontends > 0
        self._stall_s = config.stream_buffer_stall_s
        self._app = app
        self._server: uvicorn.Server | None = None
        self._ticking = anyio.CancelScope()

    async def start(self, tasks: TaskGroup) -> int:
        """Listens; returns the port. Raises ConfigurationError if the address cannot be had."""
        listener = self._listen()
        server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                log_config=None,
                log_level="warning",
                access_log=False,
                http=HttpConnection,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        # The parts of uvicorn's `serve` but for its signal handlers, which are the service's.
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await server.startup(sockets=[listener])
        tasks.start_soon(self._tick, server)
        self._server = server
        port: int = listener.getsockname()[1]
        return port

    async def stop(self, grace_s: float) -> None:
        """Stops listening; responses in progress have `grace_s` to end."""
        server, self._server = self._server, None
        if server is None:
            return
        self._ticking.cancel()
        server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        await server.shutdown()

    async def _tick(self, server: uvicorn.Server) -> None:
        # Instead of uvicorn's main loop, which wakes ten times a second to see if it should exit.
        with self._ticking:
            while True:
                await server.on_tick(0)
                await anyio.sleep(TICK_S)

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server(
                (self._host, self._port), family=family, reuse_port=self._shared
            )
        except OSError as error:
            raise ConfigurationError(
                f"http port {self._port} on {self._host} cannot be opened: {error.strerror}; "
                "choose another with --http-port, or 0 for any free one"
            ) from error
        # Connections inherit it. asyncio sets it only where the socket names TCP as its protocol,
        # which this one leaves open; without it the end of a response waits for a late ACK (40 ms).
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            # A client that is given up would else keep its connection, and what waits in it.
            stall_ms = min(math.ceil(self._stall_s * 1000), SOCKET_OPTION_MAX)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        return listener

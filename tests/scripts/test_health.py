"""`polychip health`: its exit status says whether the service serves."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner
from typing_extensions import override

from scripts.cli.main import main


@pytest.fixture
def service() -> Iterator[Callable[[int], int]]:
    """Starts a service whose /health says a code; returns its port."""
    servers: list[HTTPServer] = []

    def start(code: int) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(code if self.path == "/health" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            @override
            def log_message(self, format: str, *args: object) -> None:
                del format, args

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return int(server.server_address[1])

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("code", "exit_status"), [(200, 0), (503, 1)], ids=str)
def test_the_exit_status_is_the_service_s_own_word(
    service: Callable[[int], int], code: int, exit_status: int
) -> None:
    result = CliRunner().invoke(main, ["health", "--http-port", str(service(code))])
    assert result.exit_code == exit_status
    assert f"(HTTP {code})" in result.output


def test_nobody_there_is_another_status() -> None:
    result = CliRunner().invoke(main, ["health", "--http-port", "1"])
    assert result.exit_code == 3
    assert "nothing answers at 127.0.0.1:1" in result.output

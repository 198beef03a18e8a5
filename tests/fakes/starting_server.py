"""A server that is not there at first, then has no model, then answers; it ends on SIGTERM.

Usage: starting_server.py PORT [STATUS]
    STATUS  every completion is refused with it
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = 'data: {"choices": [{"text": "Paris"}]}\n\ndata: [DONE]\n\n'
REFUSALS_COUNT = 3


class Handler(BaseHTTPRequestHandler):
    refusals_left = REFUSALS_COUNT

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        refused = int(sys.argv[2]) if len(sys.argv) > 2 else 0
        if not refused and type(self).refusals_left:
            type(self).refusals_left -= 1
            refused = 503
        self.send_response(refused or 200)
        self.end_headers()
        self.wfile.write((json.dumps({"error": "no"}) if refused else ANSWER).encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def main() -> None:
    time.sleep(0.2)
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        print("listening", flush=True)  # noqa: T201
        server.serve_forever()


if __name__ == "__main__":
    main()

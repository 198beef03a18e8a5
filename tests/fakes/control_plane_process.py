"""A stand-in for the control plane as the launcher sees it.

Announces ports, answers /health, serves the admin service, ends on SIGTERM.

Usage: control_plane_process.py FOLDER ANNOUNCE
    FOLDER/verdicts   each line "WORKER PID INCARNATION" is sent as a verdict
    FOLDER/unhealthy  /health says 503 while the file exists
    FOLDER/end        ends with the status in the file
    FOLDER/late       announces nothing while the file exists
    FOLDER/stubborn   SIGTERM is ignored while the file exists
    FOLDER/key        the admin service asks for the API key in the file
    FOLDER/broken     chip1 is unavailable while the file exists, for the reason in it
    FOLDER/slow       the status takes half a second while the file exists
    FOLDER/NAME.used  it had a use for every process of this worker while the file exists
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc

from protos import admin_pb2, admin_pb2_grpc

FOLDER = Path(sys.argv[1])


def check_key(context: grpc.ServicerContext) -> None:
    path = FOLDER / "key"
    sent = dict(context.invocation_metadata()).get("authorization")
    if path.exists() and sent != f"Bearer {path.read_text()}":
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no valid key")


def lost(used: Path) -> Iterator[admin_pb2.WorkerStatus]:
    """The processes of the worker a file is named after, as a control plane has lost ones."""
    for line in used.with_suffix(".pids").read_text().split():
        yield admin_pb2.WorkerStatus(id=used.stem, state="lost", pid=int(line))


class Admin(admin_pb2_grpc.AdminServiceServicer):
    def GetStatus(self, request, context):  # noqa: ARG002, N802
        check_key(context)
        if (FOLDER / "slow").exists():
            time.sleep(0.5)
        workers = [admin_pb2.WorkerStatus(id="chip0", state="x")]
        broken = FOLDER / "broken"
        if broken.exists():
            reason = broken.read_text()
            workers.append(admin_pb2.WorkerStatus(id="chip1", state="unavailable", reason=reason))
        workers += [worker for path in FOLDER.glob("*.used") for worker in lost(path)]
        return admin_pb2.GetStatusResponse(workers=workers)

    def WatchVerdicts(self, request, context) -> Iterator[admin_pb2.Verdict]:  # noqa: ARG002, N802
        check_key(context)
        sent = 0
        while context.is_active():
            path = FOLDER / "verdicts"
            lines = path.read_text().splitlines() if path.exists() else []
            for line in lines[sent:]:
                name, pid, incarnation = line.split()
                yield admin_pb2.Verdict(
                    worker_id=name, incarnation=int(incarnation), pid=int(pid), reason="frozen"
                )
            sent = len(lines)
            time.sleep(0.05)


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if (FOLDER / "unhealthy").exists() else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def on_sigterm(*_: object) -> None:
    if not (FOLDER / "stubborn").exists():
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, on_sigterm)
    http = ThreadingHTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    server = grpc.server(ThreadPoolExecutor(4))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(Admin(), server)
    ports = {
        "http_port": http.server_port,
        "grpc_port": server.add_insecure_port("127.0.0.1:0"),
        "worker_port": 1,
        "pid": os.getpid(),
    }
    server.start()
    while (FOLDER / "late").exists():
        time.sleep(0.05)
    unfinished = FOLDER / "announce.unfinished"
    unfinished.write_text(json.dumps(ports))
    unfinished.rename(sys.argv[2])
    while not (FOLDER / "end").exists():
        time.sleep(0.05)
    os._exit(int((FOLDER / "end").read_text()))


if __name__ == "__main__":
    main()

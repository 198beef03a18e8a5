"""Starts that must fail: `polychip serve` on a model or with options that cannot be served."""

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.end_to_end.cluster import ROOT

ENDED_WITHIN_S = 120.0
POLL_S = 0.2


def refused_start(model_path: Path, folder: Path, *options: str) -> str:
    """All that was said by a service that ended by itself, with an error, and was never ready."""
    announced, output = folder / "announce.json", folder / "output"
    command = [sys.executable, "-m", "scripts.cli.main", "serve", "--model", str(model_path)]
    command += ["--http-port", "0", "--grpc-port", "0", "--worker-port", "0", "--dtype", "float32"]
    command += ["--announce", str(announced), *options]
    with output.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        give_up = time.monotonic() + ENDED_WITHIN_S
        while process.poll() is None:
            assert time.monotonic() < give_up, output.read_text()
            assert not is_ready(announced), output.read_text()
            time.sleep(POLL_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0, output.read_text()
    return output.read_text()


def is_ready(announced: Path) -> bool:
    """True if it listens and says that it serves."""
    if not announced.exists():
        return False
    port = json.loads(announced.read_text())["http_port"]
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5.0, trust_env=False).is_success
    except httpx.TransportError:
        return False

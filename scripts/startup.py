"""How long a server takes from its launch to the first token of an answer.

launch -> control plane listens -> worker registered -> weights loaded -> group serves -> token

The log of `polychip serve` tells the stages between; of any other server there is the last one.
"""

import json
import resource
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from http import HTTPStatus
from subprocess import DEVNULL, STDOUT
from typing import IO

import anyio
from anyio.abc import Process

from scripts.child_process import describe_exit, end_child
from scripts.workloads.prompts import Prompt
from scripts.workloads.streaming import Answer, Endpoint, RequestFailed, complete

STAGES = {
    "service.listening": "control plane listens",
    "worker.registered": "worker registered",
    "shard.loaded": "weights loaded",
    "group.serving": "group serves",
}
"""What an event of the log means, in their order; of several workers the last one counts."""
HOST = "127.0.0.1"
PROMPT = Prompt("The capital of France is", 5)
POLL_S = 0.05
DEADLINE_S = 300.0
END_GRACE_S = 30.0
LOG_CHARACTERS = 2000


class StartFailed(Exception):
    """A server that was launched gave no answer; the message has the end of what it printed."""


@dataclass(frozen=True)
class StartUp:
    """One start: seconds since the launch.

    stages_s: by the names in STAGES, those that were told. processor_s: what all processes of the
    server took of the processors, from their launch to their end.
    """

    stages_s: Mapping[str, float]
    first_token_s: float
    processor_s: float


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        port: int = listening.getsockname()[1]
        return port


async def start_up(command: Sequence[str], port: int, deadline_s: float = DEADLINE_S) -> StartUp:
    """Launches a server, asks it for one token as soon as it answers, and ends it.

    command: of a server that speaks OpenAI's completions at `port` of this machine. Raises
    StartFailed.
    """
    before_s = _processor_s()
    with tempfile.TemporaryFile("w+b") as log:
        launched, launched_s = datetime.now(timezone.utc), time.perf_counter()
        try:
            process = await anyio.open_process(
                list(command), stdin=DEVNULL, stdout=log, stderr=STDOUT, start_new_session=True
            )
        except OSError as error:
            raise StartFailed(f"{command[0]} cannot be launched: {error}") from error
        try:
            with anyio.fail_after(deadline_s):
                endpoint = Endpoint(f"http://{HOST}:{port}", "default", ignore_eos=False)
                answer = await _first_answer(process, endpoint)
        except (TimeoutError, RequestFailed, StartFailed) as error:
            reason = str(error) or f"no answer within {deadline_s:g} s"
            raise StartFailed(f"{reason}\n{_text(log)[-LOG_CHARACTERS:]}") from error
        finally:
            with anyio.CancelScope(shield=True):
                await end_child(process, END_GRACE_S)
        stages_s = stages_of(_text(log), launched)
    return StartUp(stages_s, answer.times_s[0] - launched_s, _processor_s() - before_s)


async def _first_answer(process: Process, endpoint: Endpoint) -> Answer:
    """Asks until the server answers; raises RequestFailed if it refuses for good."""
    while True:
        try:
            return await complete(endpoint, PROMPT, 1)
        except RequestFailed as error:
            # Not there yet, or there without a model.
            if error.status not in (None, HTTPStatus.SERVICE_UNAVAILABLE):
                raise
        if process.returncode is not None:
            raise StartFailed(f"it {describe_exit(process.returncode)}")
        await anyio.sleep(POLL_S)


def stages_of(log: str, launched: datetime) -> dict[str, float]:
    """When each stage was reached, in seconds from `launched`; other lines are passed over."""
    found: dict[str, float] = {}
    for line in log.splitlines():
        try:
            event = json.loads(line)
            stage = STAGES[event["event"]]
            at = datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00"))
        except (ValueError, TypeError, LookupError):
            continue
        found[stage] = (at - launched).total_seconds()
    return found


def _text(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")


def _processor_s() -> float:
    """Of all children that have ended, and theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime

"""What a token costs on its way from a step to clients: found as text, formatted, sent.

tokens of a step --> Intake (detokenizer, answers, HTTP or gRPC server) --> (clients in another
process)

The whole intake runs as in the service, with a vocabulary of made-up words; in place of the
scheduling core stands one that says what it is told to.
"""

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

import anyio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from control_plane.config import ControlPlaneConfig, SchedulingConfig
from control_plane.intake.front import Intake
from control_plane.intake.model_files import ModelFiles, TokenizerJson
from control_plane.intake.whole_service import LocalService
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import (
    Accepted,
    Event,
    RequestFacts,
    ServingChanged,
    Snapshot,
    Submit,
    TokenDelta,
    Tokens,
)
from scripts.control_cost.peer import PeerFailed, peer

PROTOCOLS = ("http", "grpc")
CLIENTS = "scripts.control_cost.reading_clients"
CONTEXT_TOKENS = 1 << 20
WORDS_COUNT = 2000
WORD_LETTERS = 4
ROUND_S = 0.02
"""Between two deliveries: a step's time, in which every stream is written to."""
WARM_UP_ROUNDS = 5
START_DEADLINE_S = 60.0
END_DEADLINE_S = 30.0


@dataclass(frozen=True)
class StreamCost:
    """Seconds of processor time of this process, all its threads; by the token.

    tokens_at_once: of a stream that were delivered before it was written to. tokens_per_event: what
    came of that, as the clients counted. detokenize_s: until the text of a token is known.
    stream_s: from there until it is sent; that of an event is `tokens_per_event` times as much.
    """

    protocol: str
    tokens_at_once: int
    tokens_per_event: float
    detokenize_s: float
    stream_s: float


async def measure_streams(
    protocol: str, streams_count: int, tokens_at_once: int, rounds_count: int, seed: int
) -> StreamCost:
    """Delivers tokens to so many streams in rounds. Raises PeerFailed."""
    tokens_count = (WARM_UP_ROUNDS + rounds_count + 1) * tokens_at_once
    steps = _ToldSteps(random.Random(seed))
    intake = _intake(steps, streams_count)
    try:
        async with anyio.create_task_group() as tasks:
            ports = await intake.start(tasks)
            port = ports.http_port if protocol == "http" else ports.grpc_port
            arguments = (protocol, port, streams_count, tokens_count)
            with peer(CLIENTS, *arguments) as clients:
                with anyio.fail_after(START_DEADLINE_S):
                    await steps.wait_for(streams_count)
                for _ in range(WARM_UP_ROUNDS):
                    await _deliver(intake, steps, tokens_at_once)
                started_s, detokenize_s = time.process_time(), 0.0
                for _ in range(rounds_count):
                    detokenize_s += await _deliver(intake, steps, tokens_at_once)
                taken_s = time.process_time() - started_s
                await _deliver(intake, steps, tokens_at_once)
                with anyio.fail_after(END_DEADLINE_S):
                    while clients.poll() is None:  # noqa: ASYNC110 - once, at the end
                        await anyio.sleep(ROUND_S)
                printed, _ = clients.communicate()
            await intake.stop()
    except TimeoutError as error:
        raise PeerFailed(
            f"{streams_count} {protocol} clients did not read their answers"
        ) from error
    if clients.returncode:
        raise PeerFailed(f"{streams_count} {protocol} clients failed: status {clients.returncode}")
    measured_count = streams_count * rounds_count * tokens_at_once
    return StreamCost(
        protocol=protocol,
        tokens_at_once=tokens_at_once,
        tokens_per_event=streams_count * tokens_count / int(printed),
        detokenize_s=detokenize_s / measured_count,
        stream_s=max(0.0, taken_s - detokenize_s) / measured_count,
    )


async def _deliver(intake: Intake, steps: "_ToldSteps", count: int) -> float:
    """As many steps at once; returns what it took to take them, and lets the servers write."""
    made = [steps.next() for _ in range(count)]
    started_s = time.thread_time()
    for tokens in made:
        intake.deliver(tokens)
    taken_s = time.thread_time() - started_s
    await anyio.sleep(ROUND_S)
    return taken_s


class _ToldSteps:
    """In place of the core: accepts requests, and has a token for each of them in every step."""

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.deliver: Callable[[Accepted], None]
        self._counts: dict[str, int] = {}
        self._facts = RequestFacts("g0")

    def post(self, event: Event) -> None:
        """Takes an event of intake."""
        if isinstance(event, Submit):
            self._counts[event.request.request_id] = 0
            self.deliver(Accepted(event.request.request_id, CONTEXT_TOKENS))

    def snapshot(self) -> Snapshot:
        """Nobody looks."""
        return Snapshot((), (), 0, 0, 0, 0, 0)

    async def wait_for(self, requests_count: int) -> None:
        """Returns when so many requests were submitted."""
        while len(self._counts) < requests_count:  # noqa: ASYNC110 - once, at the start
            await anyio.sleep(ROUND_S)

    def next(self) -> Tokens:
        """One more token of every request."""
        deltas = []
        for request_id, count in self._counts.items():
            word = self.draws.randrange(WORDS_COUNT)
            deltas.append(TokenDelta(request_id, count, (word,), (), self._facts))
            self._counts[request_id] = count + 1
        return Tokens(tuple(deltas))


def _intake(steps: _ToldSteps, streams_count: int) -> Intake:
    config = ControlPlaneConfig(
        model_path="",
        http_port=0,
        grpc_port=0,
        scheduling=SchedulingConfig(queue_requests_max=streams_count),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        _save_words(path, steps.draws)
        model = ModelFiles(
            path=path,
            name="made-up",
            architecture="",
            context_tokens=CONTEXT_TOKENS,
            vocabulary_size=WORDS_COUNT,
            end_token_ids=(),
            chat_template=None,
            special_tokens={},
            tokenizer=TokenizerJson(path),
        )
        metrics = Metrics()
        service = LocalService(steps.snapshot, lambda: 0, metrics.expose)
        intake = Intake(config, model, steps.post, service, time.monotonic, metrics=metrics)
    steps.deliver = intake.deliver
    intake.deliver(ServingChanged(("g0",)))
    return intake


def _save_words(path: Path, draws: random.Random) -> None:
    """A byte-level vocabulary of words with a space before them, each one token."""
    words: dict[str, int] = {}
    while len(words) < WORDS_COUNT:
        words.setdefault(
            "\u0120" + "".join(draws.choices(ascii_lowercase, k=WORD_LETTERS)), len(words)
        )
    library = Tokenizer(models.BPE(vocab=words, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.save(str(path))

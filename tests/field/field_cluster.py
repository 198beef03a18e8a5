"""A running cluster as the field scenarios see it: asking on every protocol, and the shared checks.

ORACLE  what the product answers alone on an empty cache (or a Chain's own script)
ALIVE   a fixed short request gets its ORACLE answer on every group within 5 s
IDLE    5 s after traffic no table holds a request and the books of the blocks close
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx

from protos import admin_pb2, inference_pb2
from tests.end_to_end.cluster import Cluster, Clusters
from tests.end_to_end.generation import Client
from tests.fakes.field_models import Chain, FieldModel
from tests.fakes.field_tokenizers import FieldTokenizer
from tests.field.answers import (
    Answer,
    SseStream,
    answer_of_body,
    answer_of_messages,
    answer_of_stream,
    http_refusal,
    read_sse,
    strict_json,
)

PROTOCOLS = ("http", "http-stream", "grpc")
BLOCK, POOL_BLOCKS, CONTEXT, CHUNK, RUNNING_MAX, QUEUE_MAX = 16, 64, 256, 32, 8, 16
SMALL = (
    *("--groups", "1", "--dtype", "float32", "--block-tokens", str(BLOCK)),
    *("--kv-blocks", str(POOL_BLOCKS), "--context", str(CONTEXT), "--chunk-tokens", str(CHUNK)),
    *("--max-running", str(RUNNING_MAX), "--max-queue", str(QUEUE_MAX)),
)
CALL_DEADLINE_S = 120.0
ALIVE_DEADLINE_S = 5.0
IDLE_DEADLINE_S = 5.0
ALIVE_PROMPT = "the quick brown fox"
ALIVE_TOKENS = 8
LOGPROB_TOLERANCE = 1e-4
SAMPLING_NAMES = frozenset(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or the messages of a conversation."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class ClusterSpec:
    """What a scenario runs on: a model, and options of `polychip serve` that replace SMALL's."""

    model: FieldModel = field(default_factory=FieldModel)
    options: tuple[str, ...] = ()


class FieldCluster:
    """Asks the cluster and checks it. http: a client with the base URL set; client: gRPC stubs."""

    def __init__(self, spec: ClusterSpec, cluster: Cluster, client: Client) -> None:
        self.spec = spec
        self.cluster = cluster
        self.client = client
        self.tokenizer: FieldTokenizer = spec.model.tokenizer
        self.http = httpx.Client(
            base_url=cluster.http,
            timeout=CALL_DEADLINE_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )
        self._oracles: dict[tuple[tuple[int, ...], int], Answer] = {}

    def close(self) -> None:
        """Closes the HTTP client; the cluster is not ours."""
        self.http.close()

    # ---------------------------------------------------------------- asking

    def ask(self, protocol: str, prompt: Prompt, **parameters: object) -> Answer:
        """One greedy request to its end, with token ids and log-probabilities; raises Refused.

        protocol: one of PROTOCOLS. parameters: under the names both protocols share, such as
        max_tokens, temperature, stop, stop_token_ids, min_tokens, ignore_eos, n, seed; None leaves
        a default out.
        """
        if protocol == "grpc":
            request = self.grpc_request(prompt, **parameters)
            return answer_of_messages(self.client.inference.Generate(request, CALL_DEADLINE_S))
        path, body = self.http_request(prompt, **parameters)
        if protocol == "http":
            response = self.http.post(path, **json_content(body))
            if response.status_code != 200:
                raise http_refusal(response.status_code, response.text)
            return answer_of_body(strict_json(response.text))
        assert protocol == "http-stream", protocol
        stream = self.stream(path, body | {"stream_options": {"include_usage": True}})
        if stream.status != 200:
            raise http_refusal(stream.status, stream.body)
        return answer_of_stream(stream)

    def grpc_request(self, prompt: Prompt, **parameters: object) -> inference_pb2.GenerateRequest:
        """The request `ask` sends over gRPC."""
        wanted = {"temperature": 0.0, "logprobs": True} | parameters
        request = inference_pb2.GenerateRequest()
        for name, value in wanted.items():
            target = request.sampling if name in SAMPLING_NAMES else request
            if value is None:
                continue
            if isinstance(value, Mapping):
                getattr(target, name).update(value)
            elif isinstance(value, Sequence) and not isinstance(value, str):
                getattr(target, name).extend(value)
            else:
                setattr(target, name, value)
        if isinstance(prompt, str):
            request.prompt = prompt
        elif is_chat(prompt):
            for message in prompt:
                assert isinstance(message, Mapping)
                request.chat.messages.add(**message)
        else:
            request.prompt_ids.SetInParent()
            request.prompt_ids.ids.extend(prompt)
        return request

    def http_request(self, prompt: Prompt, **parameters: object) -> tuple[str, dict[str, Any]]:
        """Path and body `ask` sends over HTTP."""
        chat = is_chat(prompt)
        wanted: dict[str, Any] = {
            "model": "default",
            "temperature": 0,
            "return_token_ids": True,
            "logprobs": True if chat else 0,
        }
        wanted |= parameters
        wanted["messages" if chat else "prompt"] = prompt
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return path, {name: value for name, value in wanted.items() if value is not None}

    def stream(self, path: str, body: Mapping[str, object]) -> SseStream:
        """Posts the body with `stream` on and reads the raw events to the end."""
        with self.open_stream(path, body) as response:
            return read_sse(response)

    @contextmanager
    def open_stream(self, path: str, body: Mapping[str, object]) -> Iterator[httpx.Response]:
        """The same, for those who leave early: answers.sse_events reads response.iter_lines()."""
        content = json_content({**body, "stream": True})
        with self.http.stream("POST", path, **content) as response:
            yield response

    def ids_of(self, text: str) -> list[int]:
        """A text as ids, with the start token if the model has one."""
        return self.tokenizer.encode(text)

    # ---------------------------------------------------------------- shared checks

    def oracle(self, prompt: Sequence[int] | str, tokens_count: int) -> Answer:
        """ORACLE: `tokens_count` greedy tokens over end tokens; the cache is emptied around it.

        Nothing else may run the first time it is asked; later it is remembered.
        """
        ids = self.ids_of(prompt) if isinstance(prompt, str) else list(prompt)
        key = (tuple(ids), tokens_count)
        if key not in self._oracles:
            self.client.flush()
            answer = self.ask("grpc", ids, max_tokens=tokens_count, ignore_eos=True)
            assert answer.cached_tokens == 0, "the cache was not empty"
            if isinstance(self.spec.model.weights, Chain):
                assert answer.ids == self.script(ids[-1], tokens_count), "not what is scripted"
            self._oracles[key] = answer
            self.client.flush()
        return self._oracles[key]

    def script(self, last_id: int, tokens_count: int, ends: Sequence[int] = ()) -> list[int]:
        """What a Chain answers to a prompt that ends with `last_id`."""
        weights = self.spec.model.weights
        assert isinstance(weights, Chain), "only a Chain has a script"
        return weights.answer(self.tokenizer, last_id, tokens_count, ends)

    def check_alive(self) -> None:
        """ALIVE, on every group that exists. Ask for it once early, while nothing else runs."""
        expected = self.oracle(ALIVE_PROMPT, ALIVE_TOKENS)
        missing = {group.id for group in self.status().groups}
        calls_count = calls_max = len(missing)
        if len(missing) > 1:
            calls_max *= RUNNING_MAX
        deadline = time.monotonic() + ALIVE_DEADLINE_S
        while missing:
            assert time.monotonic() < deadline, f"no answer from {missing} in {ALIVE_DEADLINE_S} s"
            answers = together(*[self._ask_alive] * calls_count)
            for answer in answers:
                check_equal(answer, expected)
            missing -= {answer.group for answer in answers}
            # A few fit the group that seems fastest: the more there are, the further they spread.
            calls_count = min(2 * calls_count, calls_max)

    def check_idle(self) -> None:
        """IDLE; leaves the prefix cache empty."""
        deadline = time.monotonic() + IDLE_DEADLINE_S
        while (problem := idle_problem(self.status())) is not None:
            assert time.monotonic() < deadline, f"not idle after {IDLE_DEADLINE_S} s: {problem}"
            time.sleep(0.05)
        self.client.flush()
        for group in self.status().groups:
            blocks = group.blocks
            assert blocks.free == blocks.total, f"blocks are lost after a flush: {blocks}"

    def _ask_alive(self) -> Answer:
        return self.ask("grpc", ALIVE_PROMPT, max_tokens=ALIVE_TOKENS, ignore_eos=True)

    def status(self) -> admin_pb2.GetStatusResponse:
        """The status of the service."""
        return self.client.status()

    def worker_pids(self) -> dict[str, int]:
        """Process id of each worker."""
        return {worker.id: worker.pid for worker in self.status().workers}


def json_content(body: Mapping[str, object]) -> dict[str, Any]:
    """What httpx sends as the body; NaN and Infinity are written as other Python clients do."""
    return {"content": json.dumps(body), "headers": {"content-type": "application/json"}}


def is_chat(prompt: Prompt) -> bool:
    """A conversation, not a text or token ids."""
    return not isinstance(prompt, str) and any(isinstance(each, Mapping) for each in prompt)


def together(*calls: Callable[[], Result]) -> list[Result]:
    """Runs calls at the same time, each on a thread; results in their order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def check_equal(answer: Answer, expected: Answer) -> None:
    """Ids are equal, and log-probabilities within the tolerance."""
    assert answer.ids == expected.ids, f"{answer.ids} instead of {expected.ids}"
    assert answer.text == expected.text, f"{answer.text!r} instead of {expected.text!r}"
    pairs = zip(answer.logprobs, expected.logprobs, strict=True)
    apart = max((abs(one - other) for one, other in pairs), default=0.0)
    assert apart <= LOGPROB_TOLERANCE, f"log-probabilities differ by {apart}"


def idle_problem(status: admin_pb2.GetStatusResponse) -> str | None:
    """What keeps the service from being idle, or None."""
    tables = {each.name: value for each, value in status.requests.ListFields()}
    if any(tables.values()):
        return f"tables hold {tables}"
    for group in status.groups:
        blocks = group.blocks
        if group.running or group.waiting or blocks.referenced:
            return f"{group}"
        if blocks.free + blocks.cached != blocks.total:
            return f"the books do not close: {group}"
    return None


class FieldClusters:
    """Field clusters by what they run on; at most one is alive. Models are written once."""

    def __init__(self, clusters: Clusters, folder: Path) -> None:
        self._clusters = clusters
        self._folder = folder
        self._paths: dict[FieldModel, Path] = {}
        self._current: FieldCluster | None = None

    def path(self, model: FieldModel) -> Path:
        """The model's directory."""
        if model not in self._paths:
            path = self._folder / f"model-{len(self._paths)}"
            model.write(path)
            self._paths[model] = path
        return self._paths[model]

    def options(self, spec: ClusterSpec) -> tuple[str, ...]:
        """Options for `polychip serve`, for scenarios that start a Cluster of their own."""
        return ("--model", str(self.path(spec.model)), *SMALL, *spec.options)

    def running(self, spec: ClusterSpec) -> FieldCluster:
        """The cluster for the spec, all of whose groups serve: the running one, or a new one."""
        options = self.options(spec)
        cluster = self._clusters.cluster(*options)
        client = self._clusters.client(*options)
        current = self._current
        if current is None or current.cluster is not cluster:
            if current is not None:
                current.close()
            current = self._current = FieldCluster(spec, cluster, client)
        return current

    def close(self) -> None:
        """Closes clients, and the cluster that runs: two do not fit the machine."""
        if self._current is not None:
            self._current.close()
            self._current = None
        self._clusters.close()


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    """The code with which a gRPC call ends."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK

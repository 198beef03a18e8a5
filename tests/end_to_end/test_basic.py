"""What a person does first, over real processes: ask, look, ask wrongly, stop; and idling."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import inference_pb2
from tests.end_to_end.cluster import ORDINARY, ROOT, Cluster, Clusters
from tests.end_to_end.generation import request_of

OPTIONS = ORDINARY
CONTEXT = 8192
REST_DEADLINE_S = 20.0
IDLE_S = 10.0
IDLE_SHARE_MAX = 0.02
DRAINED_TOKENS = 24
FRANCE = "What is the capital of France?"


@pytest.fixture
def cluster(clusters: Clusters) -> Cluster:
    return clusters.cluster(*OPTIONS)


def polychip(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a client command against the cluster."""
    ports = ["--grpc-port", cluster.grpc.rpartition(":")[2]]
    ports += ["--http-port", cluster.http.rpartition(":")[2]]
    return subprocess.run(
        [sys.executable, "-m", "scripts.cli.main", *arguments, *ports],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def status_at_rest(cluster: Cluster) -> dict[str, Any]:
    """The status once the last step is back: an answer may end before it."""
    deadline = time.monotonic() + REST_DEADLINE_S
    while True:
        status: dict[str, Any] = json.loads(polychip(cluster, "status", "--json").stdout)
        if set(status["requests"].values()) == {0}:
            return status
        assert time.monotonic() < deadline, status


@pytest.mark.end_to_end
def test_the_printed_curl_line_answers(cluster: Cluster) -> None:
    line = next(line for line in cluster.output().splitlines() if line.startswith("curl "))
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120, check=True)
    answer = json.loads(done.stdout)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0


@pytest.mark.end_to_end
def test_start_prints_settings_and_its_time(cluster: Cluster) -> None:
    output = cluster.output()
    assert "chunk-tokens" in output
    assert "/health answers 200 after" in output


@pytest.mark.end_to_end
def test_chat_says_paris(cluster: Cluster) -> None:
    done = polychip(cluster, "chat", FRANCE)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    as_json = polychip(cluster, "chat", "--json", FRANCE)
    assert json.loads(as_json.stdout)["text"] == done.stdout.removesuffix("\n")


@pytest.mark.end_to_end
def test_status_for_programs_and_people(cluster: Cluster) -> None:
    status = status_at_rest(cluster)
    worker, group = status["workers"][0], status["groups"][0]
    assert {"id", "pid", "incarnation", "state", "device", "group"} <= set(worker)
    assert (worker["id"], worker["state"], worker["group"]) == ("chip0", "serving", "g0")
    os.kill(worker["pid"], 0)
    assert {"id", "epoch", "ranks", "running", "waiting", "retracted", "blocks"} <= set(group)
    assert group["ranks"] == ["chip0"]
    blocks = group["blocks"]
    assert blocks["free"] + blocks["cached"] + blocks["referenced"] == blocks["total"] > 0
    assert isinstance(status["generated_tokens"], int)
    shown = polychip(cluster, "status")
    assert shown.returncode == 0
    assert "chip0" in shown.stdout


@pytest.mark.end_to_end
def test_flush_frees_what_is_cached(cluster: Cluster) -> None:
    polychip(cluster, "chat", "--max-tokens", "40", "Tell me about rivers and where they begin.")
    status_at_rest(cluster)
    freed = json.loads(polychip(cluster, "cache", "flush", "--json").stdout)["blocks_freed"]
    assert freed > 0
    blocks = status_at_rest(cluster)["groups"][0]["blocks"]
    assert blocks["free"] == blocks["total"]


BAD_HTTP = {
    "empty prompt": ("/v1/completions", {"model": "default", "prompt": ""}, 400, ["prompt"]),
    "prompt over context": (
        "/v1/completions",
        {"model": "default", "prompt": [5] * (CONTEXT + 1)},
        400,
        ["prompt", str(CONTEXT)],
    ),
    "unknown model": (
        "/v1/completions",
        {"model": "gpt-unknown", "prompt": "hello"},
        404,
        ["gpt-unknown", "default"],
    ),
    "no messages": (
        "/v1/chat/completions",
        {"model": "default", "messages": []},
        400,
        ["messages"],
    ),
    "malformed JSON": ("/v1/completions", '{"model": "default", "prompt": ', 400, ["JSON"]),
    "NaN temperature": (
        "/v1/completions",
        '{"model": "default", "prompt": "hello", "temperature": NaN}',
        400,
        ["temperature"],
    ),
    "negative temperature": (
        "/v1/completions",
        {"model": "default", "prompt": "hello", "temperature": -1},
        400,
        ["temperature", "0"],
    ),
    "unknown token": (
        "/v1/completions",
        {"model": "default", "prompt": [10_000_000]},
        400,
        ["prompt", "10000000"],
    ),
}


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", BAD_HTTP)
def test_bad_input_over_http(cluster: Cluster, name: str) -> None:
    path, body, status, words = BAD_HTTP[name]
    content = body if isinstance(body, str) else json.dumps(body)
    answer = httpx.post(
        cluster.http + path,
        content=content,
        headers={"content-type": "application/json"},
        timeout=30,
        trust_env=False,
    )
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    for word in words:
        assert word in message, message


def bad_grpc() -> Iterator[tuple[str, inference_pb2.GenerateRequest, grpc.StatusCode, str]]:
    """Name, request, expected code, word the message must hold."""
    invalid, unknown = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    empty = request_of([], 4)
    empty.prompt = ""
    yield "empty prompt", empty, invalid, "prompt"
    yield "prompt over context", request_of([5] * (CONTEXT + 1), 4), invalid, str(CONTEXT)
    other = request_of([5, 6, 7], 4)
    other.model = "gpt-unknown"
    yield "unknown model", other, unknown, "gpt-unknown"
    yield "NaN temperature", request_of([5], 4, temperature=float("nan")), invalid, "temperature"
    yield "no tokens", request_of([5], 0), invalid, "max_tokens"


BAD_GRPC = {name: (request, code, word) for name, request, code, word in bad_grpc()}


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", BAD_GRPC)
def test_bad_input_over_grpc(clusters: Clusters, name: str) -> None:
    request, code, word = BAD_GRPC[name]
    client = clusters.client(*OPTIONS)
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(request)
    assert caught.value.code() is code
    assert word in caught.value.details()
    status = rpc_status.from_call(caught.value)
    assert status is not None
    kinds = {detail.TypeName() for detail in status.details}
    assert error_details_pb2.ErrorInfo.DESCRIPTOR.full_name in kinds
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        assert error_details_pb2.BadRequest.DESCRIPTOR.full_name in kinds


@pytest.mark.end_to_end
def test_others_do_not_notice_bad_input(clusters: Clusters) -> None:
    client = clusters.client(*OPTIONS)
    good = request_of(FRANCE, 12)
    alone = client.generate(good)
    stream = client.inference.Generate(good, timeout=60)
    pieces = [next(stream)]
    for request, _, _ in BAD_GRPC.values():
        with pytest.raises(grpc.RpcError):
            client.generate(request)
    pieces.extend(stream)
    assert [token for piece in pieces for token in piece.token_ids] == alone.ids


def processes_under(pid: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        found.extend(children.get(each, []))
    return found


def cpu_s(pids: list[int]) -> float:
    """Processor seconds the processes have used."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.end_to_end
def test_idling_costs_nothing(cluster: Cluster) -> None:
    pids = processes_under(cluster.pid)
    assert len(pids) >= 3, "launcher, control plane, worker"
    time.sleep(2.0)
    before = cpu_s(pids)
    time.sleep(IDLE_S)
    used = {pid: round(cpu_s([pid]), 2) for pid in pids}
    share = (cpu_s(pids) - before) / IDLE_S
    assert share < IDLE_SHARE_MAX, f"{share:.1%} of a core; totals by process {used}"


@pytest.mark.end_to_end
@pytest.mark.service
def test_sigterm_lets_a_running_answer_finish(clusters: Clusters) -> None:
    clusters.close()
    with Cluster(*OPTIONS, "--drain-deadline", "120") as cluster:
        pids = processes_under(cluster.pid)
        body = {
            "model": "default",
            "prompt": "Once",
            "max_tokens": DRAINED_TOKENS,
            "ignore_eos": True,
        }
        with httpx.stream(
            "POST",
            f"{cluster.http}/v1/completions",
            json={**body, "stream": True, "stream_options": {"include_usage": True}},
            timeout=60,
            trust_env=False,
        ) as answer:
            lines = answer.iter_lines()
            first = next(line for line in lines if line.startswith("data:"))
            cluster.terminate()
            rest = [line for line in lines if line.startswith("data:")]
        chunks = [json.loads(line.removeprefix("data:")) for line in [first, *rest[:-1]]]
        assert rest[-1] == "data: [DONE]"
        usage = next(chunk["usage"] for chunk in chunks if chunk.get("usage"))
        assert usage["completion_tokens"] == DRAINED_TOKENS
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.end_to_end
@pytest.mark.service
def test_a_split_the_model_does_not_allow_is_refused_at_once(
    clusters: Clusters,
) -> None:
    clusters.close()
    ports = ["--http-port", "0", "--grpc-port", "0", "--worker-port", "0"]
    command = [sys.executable, "-m", "scripts.cli.main", "serve", *ports]
    ended = subprocess.run(
        [*command, "--groups", "4", "--kv-policy", "shard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    # What is asked, the limit, and the remedy.
    assert "4 chips" in ended.stderr
    assert "3 key/value heads" in ended.stderr
    assert "1 to 3 chips per group" in ended.stderr

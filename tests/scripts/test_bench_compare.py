"""`polychip bench compare` against servers that answer as they are told to."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.responses import JSONResponse

from kernels.library import LibraryUnusable
from scripts.cli.main import main
from scripts.workloads import comparison, probe
from scripts.workloads.probe import probe_machine
from scripts.workloads.workload import QUICK_WORKLOADS, WARM_UP, WORKLOADS
from tests.fakes.openai_server import OpenAIServer, event
from tests.fakes.word_tokenizer import save_word_tokenizer

ROOT = Path(__file__).parents[2]
WARM_UP_REQUESTS = 17


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    save_word_tokenizer(path)
    return str(path)


@pytest.fixture
def bench(tokenizer, monkeypatch):
    """Runs the command, quick. Servers as fast as these keep the client busy: no doubts of that."""
    monkeypatch.delenv("POLYCHIP_API_KEY", raising=False)
    monkeypatch.setattr(comparison, "CLIENT_CPU_PERCENT_MAX", 1e9)

    def run(*arguments):
        command = ["bench", "compare", "--tokenizer", tokenizer, "--quick", *arguments]
        return CliRunner().invoke(main, command)

    return run


def measured(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def of_workload(server):
    """What was asked after the warm-up."""
    return server.bodies[WARM_UP_REQUESTS:]


def test_the_workloads_are_these():
    def batch(prompt_tokens, output_tokens, requests_count, at_once, prefix_tokens):
        return locals()

    w1, w2, w3, w4 = ({**vars(workload)} for workload in WORKLOADS.values())
    assert [each.pop("name") for each in (w1, w2, w3, w4)] == ["W1", "W2", "W3", "W4"]
    assert w1 == batch(128, 128, 4, 1, 0)
    assert w2 == batch(256, 128, 64, 16, 0)
    assert w3 == batch(64, 64, 64, 16, 512)
    assert w4 == {
        "prompt_tokens": 32,
        "output_tokens": 256,
        "decoders_count": 8,
        "chunks_before": 16,
        "long_prompt_tokens": 3500,
        "long_output_tokens": 16,
    }
    assert sum(workload.requests for workload in WARM_UP) == WARM_UP_REQUESTS


def test_what_is_asked(bench):
    with OpenAIServer() as server:
        measured(bench(server.address + "/v1/", "--workloads", "W1,W3", "--runs", "1", "--json"))
    alone, *prefixed = of_workload(server)
    assert alone == {
        "model": "words",
        "prompt": alone["prompt"],
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    assert len(alone["prompt"].split()) == 16
    words = [body["prompt"].split() for body in prefixed]
    assert [len(each) for each in words] == [72] * 8
    assert {tuple(each[:64]) for each in words} == {tuple(words[0][:64])}
    assert len({tuple(each[64:]) for each in words}) == 8
    assert {body["max_tokens"] for body in prefixed} == {8}


def test_json_has_every_run_and_its_figures(bench):
    with OpenAIServer(first_token_s=0.03, token_s=0.004, context_tokens=9999) as server:
        result = measured(bench(server.address, "--runs", "2", "--seed", "5", "--json"))
    assert server.at_once_max == 16  # in the warm-up
    assert set(result) == {
        *("date", "polychip", "machine", "tokenizer", "seed", "runs_count", "quick"),
        *("workloads", "servers", "runs", "summary", "remarks"),
    }
    assert {"processor", "cores", "python"} <= set(result["machine"])
    assert result["workloads"]["W4"]["long_prompt_tokens"] == 350
    assert (result["quick"], result["seed"], result["remarks"]) == (True, 5, [])
    assert result["servers"] == [
        {
            "label": server.address,
            "address": server.address,
            "model": "words",
            "server": "other",
            "version": None,
            "context_tokens": 9999,
            "ignore_eos": True,
            "before_each_run": "new prompts only",
        }
    ]
    assert [(run["number"], run["seed"]) for run in result["runs"]] == [(1, 5), (2, 6)]
    figures = result["runs"][1]["figures"]
    requests = {"W1": 1, "W2": 8, "W3": 8, "W4": 2}
    assert {name: each["requests"] for name, each in figures.items()} == requests
    assert figures["W2"]["prompt_tokens"] == 8 * 32
    assert figures["W2"]["output_tokens"] == figures["W2"]["chunks"] == 8 * 16
    assert figures["W2"]["cached_tokens"] == 8 * 5
    assert figures["W1"]["ttft_p50_ms"] >= 30
    assert figures["W1"]["inter_token_p50_ms"] >= 4
    assert figures["W1"]["decode_tokens_per_s"] <= 250
    assert figures["W4"]["long_ttft_ms"] >= 30
    assert figures["W4"]["long_prompt_tokens"] == 350
    assert figures["W4"]["chunks_during"] > 0
    assert figures["W1"]["client_cpu_percent"] > 0
    w1 = [row for row in result["summary"] if row["workload"] == "W1"]
    assert [row["figure"] for row in w1] == ["decode_tokens_per_s", "ttft_p50_ms"]
    values = [run["figures"]["W1"]["ttft_p50_ms"] for run in result["runs"]]
    assert w1[1]["median"] == pytest.approx(sum(values) / 2)
    assert (w1[1]["least"], w1[1]["most"], w1[1]["ratio"]) == (min(values), max(values), None)


def test_the_machine_is_probed_before_each_run_if_asked(bench):
    with OpenAIServer() as server:
        probed = bench(server.address, "--runs", "2", "--probe", "--workloads", "W1", "--json")
        plain = bench(server.address, "--runs", "1", "--workloads", "W1", "--json")
        table = bench(server.address, "--runs", "1", "--probe", "--workloads", "W1")
    probes = [run["probe"] for run in measured(probed)["runs"]]
    assert [run["probe"] for run in measured(plain)["runs"]] == [None]
    assert len(probes) == 2
    if probe_machine() is None:
        pytest.skip("the native kernels are not built")
    for each in probes:
        assert each["read_one_gb_per_s"] > 0
        assert each["read_every_gb_per_s"] > 0
        # None where the cores were never free together, too.
        assert each["barrier_ns"] is None or each["barrier_ns"] > 0
    assert "This machine before each run: " in table.stdout
    assert " GB/s." in table.stdout


def test_without_native_kernels_there_is_no_probe(bench, monkeypatch):
    def missing():
        raise LibraryUnusable("none")

    monkeypatch.setattr(probe, "open_library", missing)
    with OpenAIServer() as server:
        result = bench(server.address, "--runs", "1", "--probe", "--workloads", "W1")
    assert result.exit_code == 0, result.output
    assert "This machine" not in result.stdout


def test_servers_take_turns_with_new_prompts_and_polychip_is_flushed(bench):
    calls: list[tuple[str, str]] = []
    with (
        OpenAIServer(owner="polychip", calls=calls) as ours,
        OpenAIServer(first_token_s=0.2, calls=calls) as other,
    ):
        result = measured(
            bench(ours.address, other.address, "--workloads", "W1", "--runs", "2", "--json")
        )
    assert [call for call in calls if "/v1/completions" not in call[1]] == [
        (ours.address, "GET /v1/models"),
        (ours.address, "GET /health"),
        (other.address, "GET /v1/models"),
        (ours.address, "POST /admin/cache/flush"),
        (ours.address, "POST /admin/cache/flush"),
    ]
    each = 1 + WARM_UP_REQUESTS
    turns = [address for address, call in calls if call == "POST /v1/completions"]
    assert turns == ([ours.address] * each + [other.address] * each) * 2
    prompts = [body["prompt"] for body in ours.bodies + other.bodies]
    assert len(set(prompts)) == len(prompts)
    assert [run["blocks_freed"] for run in result["runs"]] == [7, None, 7, None]
    assert [server["before_each_run"] for server in result["servers"]] == [
        "cache flushed, new prompts",
        "new prompts only",
    ]
    assert [server["version"] for server in result["servers"]] == ["1.2.3", None]
    first, second = [row for row in result["summary"] if row["figure"] == "ttft_p50_ms"]
    by_run = [run["figures"]["W1"]["ttft_p50_ms"] for run in result["runs"]]
    ratios = [by_run[1] / by_run[0], by_run[3] / by_run[2]]
    assert first["ratio"] is None
    assert second["ratio"] == pytest.approx(sum(ratios) / 2)
    assert second["ratio"] > 1


def test_results_call_a_server_by_the_name_it_is_given(bench, tmp_path):
    path = tmp_path / "figures.json"
    options = ["--workloads", "W1", "--runs", "1", "--json", str(path)]
    with OpenAIServer() as first, OpenAIServer(extra_tokens=2) as second:
        result = bench(f"ours={first.address}", f"yours={second.address}/v1", *options)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    assert lines[1].split() == ["Figure", "ours", "yours", "Ratio"]
    assert "run 1 of 1, yours: W1" in result.stderr
    assert "Warning: yours: W1, run 1" in result.stderr
    document = json.loads(path.read_text())
    named = [("ours", first.address), ("yours", second.address)]
    for place in ("servers", "runs"):
        assert [(each["label"], each["address"]) for each in document[place]] == named
    assert {each["label"] for each in document["summary"]} == {"ours", "yours"}


def test_table_on_standard_output_and_a_line_per_run_beside(bench, tmp_path):
    path = tmp_path / "figures.json"
    with OpenAIServer() as server:
        result = bench(server.address, "--workloads", "w2", "--runs", "2", "--json", str(path))
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    assert lines[0].strip() == "Median of 2 runs (least to most)"
    assert lines[1].split() == ["Figure", server.address]
    assert lines[3].split()[:3] == ["W2", "output", "tokens/s"]
    assert lines[8].split() == ["W2", "cached", "tokens", "40", "(40", "to", "40)"]
    runs = result.stderr.splitlines()
    assert [line.split(":")[0] for line in runs] == ["run 1 of 2, http", "run 2 of 2, http"]
    assert all("W2" in line and "output tokens/s" in line for line in runs)
    assert json.loads(path.read_text())["runs_count"] == 2


def test_a_prompt_that_counts_otherwise_is_a_warning(bench):
    with OpenAIServer(extra_tokens=2) as server:
        result = bench(server.address, "--workloads", "W1", "--runs", "1")
    assert result.exit_code == 0
    assert f"Warning: {server.address}: W1, run 1: the server counts other tokens" in result.stderr
    assert "18 instead of 16" in result.stderr


def test_a_client_that_takes_much_of_a_core_is_a_warning(bench, monkeypatch):
    monkeypatch.setattr(comparison, "CLIENT_CPU_PERCENT_MAX", 0.0)
    with OpenAIServer() as server:
        result = bench(server.address, "--workloads", "W1", "--runs", "1")
    assert result.exit_code == 0
    assert "W1, run 1: this client took" in result.stderr


def test_answers_that_end_early_are_a_warning_and_do_not_hang_w4(bench):
    with OpenAIServer(tokens_max=2) as server:
        result = bench(server.address, "--workloads", "W4", "--runs", "1")
    assert result.exit_code == 0
    assert "3 of 3 answers ended early, the shortest after 2 tokens" in result.stderr


def test_a_context_too_small_skips_that_workload_only(bench):
    with OpenAIServer(context_tokens=200) as server:
        result = measured(bench(server.address, "--workloads", "W4,W1", "--runs", "1", "--json"))
    (run,) = result["runs"]
    assert list(run["figures"]) == ["W1"]
    needed = QUICK_WORKLOADS["W4"].context_tokens
    assert run["skipped"] == {"W4": f"needs a context of {needed} tokens, the server has 200"}
    assert len(server.bodies) == WARM_UP_REQUESTS + 1
    assert "W4, run 1: skipped: needs a context" in result["remarks"][0]


def test_a_context_too_small_for_the_warm_up_is_an_error(bench):
    with OpenAIServer(context_tokens=50) as server:
        result = bench(server.address)
    assert result.exit_code == 1
    assert f"{server.address}: warm-up: needs a context of 56 tokens" in result.stderr


def test_a_server_that_says_so_only_when_asked_is_skipped_too(bench):
    def too_long(_request, body):
        if len(body.get("prompt", "").split()) < 300:
            return None
        return JSONResponse({"error": {"message": "exceeds the Context size"}}, 400)

    with OpenAIServer(refuse=too_long) as server:
        result = measured(bench(server.address, "--workloads", "W4,W1", "--runs", "1", "--json"))
    (run,) = result["runs"]
    assert run["skipped"] == {"W4": "HTTP 400: exceeds the Context size"}
    assert list(run["figures"]) == ["W1"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"error": {"message": "no group serves"}}, "no group serves"),
        ({"error": "no group serves"}, "no group serves"),
        ({"detail": "no group serves"}, "no group serves"),
        ({"object": "error", "message": "no group serves"}, "no group serves"),
    ],
)
def test_a_refusal_names_address_workload_status_and_reason(bench, content, message):
    def refuse(_request, body):
        return JSONResponse(content, 503) if body.get("max_tokens") == 16 else None

    with OpenAIServer(refuse=refuse) as server:
        result = bench(server.address, "--workloads", "W2", "--runs", "1")
    assert result.exit_code == 1
    assert f"Error: {server.address}: warm-up: HTTP 503: {message}" in result.stderr


@pytest.mark.parametrize(
    ("last_event", "message"),
    [
        (event({"error": {"message": "the worker died", "code": 500}}), "the worker died"),
        (b"", "the stream ended without [DONE]"),
        (b"data: nonsense\n\n", "an event is no completion: b'nonsense'"),
    ],
)
def test_a_stream_that_fails_is_an_error(bench, last_event, message):
    with OpenAIServer(last_event=last_event) as server:
        result = bench(server.address, "--workloads", "W1", "--runs", "1")
    assert result.exit_code == 1
    assert f"{server.address}: warm-up: {message}" in result.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens_details": [5]}, "its usage is no object of counts: [5]"),
        ({"prompt_tokens_details": "none"}, "its usage is no object of counts: none"),
        ({"prompt_tokens": 1e308}, "its usage has a count that is none: {'prompt_tokens': 1e+308"),
        ({"completion_tokens": -16}, "its usage has a count that is none"),
        ({"completion_tokens": 10**300}, "its usage has a count that is none"),
        ({"completion_tokens": "16"}, "its usage has a count that is none"),
        ({"prompt_tokens_details": {"cached_tokens": True}}, "its usage has a count that is none"),
    ],
)
def test_counts_that_are_none_are_an_error(bench, changes, message):
    with OpenAIServer() as sound, OpenAIServer(usage_changes=changes) as server:
        result = bench(sound.address, server.address, "--workloads", "W1", "--runs", "1")
    assert result.exit_code == 1
    assert f"Error: {server.address}: warm-up: {message}" in result.stderr


@pytest.mark.parametrize("last_event", [{"usage": [1]}, {"usage": 7}])
def test_a_usage_that_is_no_object_is_an_error(bench, last_event):
    events = event(last_event) + b"data: [DONE]\n\n"
    with OpenAIServer(last_event=events) as server:
        result = bench(server.address, "--workloads", "W1", "--runs", "1")
    assert result.exit_code == 1
    assert f"{server.address}: warm-up: its usage is no object of counts" in result.stderr


def test_counts_that_are_not_told_are_no_error(bench):
    untold = {"prompt_tokens_details": None, "prompt_tokens": None, "completion_tokens": None}
    with OpenAIServer(usage_changes=untold) as server:
        result = bench(server.address, "--workloads", "W1", "--runs", "1")
    assert result.exit_code == 0, result.output
    assert "counts no tokens in 1 of 1 answers" in result.stderr


def test_a_server_that_refuses_ignore_eos_is_asked_without(bench):
    def refuse(_request, body):
        if "ignore_eos" not in body:
            return None
        return JSONResponse({"error": {"message": "ignore_eos: not known"}}, 422)

    with OpenAIServer(refuse=refuse, usage=False) as server:
        refused = bench(server.address, "--workloads", "W1", "--runs", "1")
        result = bench(server.address, "--workloads", "W1", "--runs", "1", "--no-ignore-eos")
    assert refused.exit_code == 1
    assert "HTTP 422: ignore_eos: not known; --no-ignore-eos leaves" in refused.stderr
    assert result.exit_code == 0
    assert "counts no tokens in 1 of 1 answers" in result.stderr
    assert "stream_options" not in server.bodies[-1]


def test_the_key_is_sent_everywhere_and_asked_for(bench):
    def refuse(request, _body):
        known = request.headers.get("authorization") == "Bearer ours"
        return None if known else JSONResponse({"error": {"message": "who are you"}}, 401)

    with OpenAIServer(refuse=refuse) as server:
        without = bench(server.address, "--workloads", "W1", "--runs", "1")
        result = bench(server.address, "--workloads", "W1", "--runs", "1", "--api-key", "ours")
    assert without.exit_code == 1
    assert "HTTP 401: who are you; give a key with --api-key" in without.stderr
    assert result.exit_code == 0, result.output


def test_nothing_there_is_status_3(bench):
    result = bench("http://127.0.0.1:1", "--workloads", "W1")
    assert result.exit_code == 3
    assert "nothing answers at http://127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["127.0.0.1:8000"], "is no address such as http://"),
        (["ours=127.0.0.1:8000"], "is no address such as http://"),
        (["a=http://one:1", "a=http://two:1"], "would call 2 servers 'a'; write NAME=ADDRESS"),
        (["http://one:1", "http://one:1"], "would call 2 servers 'http://one:1'"),
        (["--workloads", "W1,W5"], "no workload 'W5'; there are W1, W2, W3, W4"),
        (["--json", "http://127.0.0.1:8000"], "is an address, not a file"),
        (["--json", "/no/such/folder/figures"], "is no file in a folder that exists"),
        (["--json=/proc/z.json"], "'/proc/z.json' cannot be written"),
        (["--plot", "figures.gif"], "does not end in one of .png, .svg, .pdf"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_asked(bench, arguments, reason):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert reason in " ".join(result.stderr.split())


def test_a_picture_without_matplotlib_is_refused_with_the_remedy(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "scripts.workloads.plot", raising=False)
    result = bench("http://127.0.0.1:1", "--plot", str(tmp_path / "figures.png"))
    assert result.exit_code == 1
    assert "-m pip install matplotlib" in result.stderr


def test_a_picture_is_drawn(bench, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib, the extra `plot`, is not installed")
    path = tmp_path / "figures.png"
    with OpenAIServer() as first, OpenAIServer(context_tokens=200) as second:
        result = bench(first.address, second.address, "--runs", "1", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("later_s", [0.0, 0.001, 0.005])
def test_ctrl_c_ends_it_whatever_runs_at_the_moment(tokenizer, later_s):
    with OpenAIServer(first_token_s=60.0) as server:
        command = [sys.executable, "-m", "scripts.cli.main", "bench", "compare", server.address]
        process = subprocess.Popen(
            [*command, "--tokenizer", tokenizer],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            while not server.bodies:
                assert process.poll() is None, process.communicate()
            time.sleep(later_s)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == ""
    assert errors.strip() == "Interrupted; nothing is shown of what was measured."

"""`polychip bench compare` at a real service: counts, cache, and that every figure is there."""

import json
import subprocess
import sys

import pytest

from tests.end_to_end.cluster import ROOT, Clusters

OPTIONS = ("--groups", "1", "--dtype", "float32", "--chunk-tokens", "512")
DEADLINE_S = 240.0


@pytest.mark.end_to_end
def test_every_workload_is_counted_as_the_service_counts(clusters: Clusters) -> None:
    clusters.client(*OPTIONS)
    address = clusters.cluster(*OPTIONS).http
    command = [sys.executable, "-m", "scripts.cli.main", "bench", "compare", address]
    done = subprocess.run(
        [*command, "--quick", "--runs", "1", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    # How much of a core the client takes depends on what else runs here.
    assert [each for each in result["remarks"] if "this client took" not in each] == []
    assert result["servers"][0]["server"] == "polychip"
    (run,) = result["runs"]
    assert run["blocks_freed"] is not None
    figures = run["figures"]
    counts = {
        name: (each["prompt_tokens"], each["output_tokens"]) for name, each in figures.items()
    }
    assert counts == {"W1": (16, 16), "W2": (256, 128), "W3": (576, 64), "W4": (16, 64)}
    assert figures["W4"]["long_prompt_tokens"] == 350
    assert figures["W1"]["cached_tokens"] == figures["W2"]["cached_tokens"] == 0
    assert figures["W3"]["cached_tokens"] > 0, "the common prefix is found"
    for name in ("output_tokens_per_s", "ttft_p50_ms", "inter_token_p50_ms"):
        assert all(each[name] > 0 for each in figures.values())

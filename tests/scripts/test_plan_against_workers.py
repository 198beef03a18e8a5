"""What `polychip plan` foretells is what workers take: blocks of the same chips and checkpoints."""

import json
from dataclasses import replace

import gguf
import pytest
from click.testing import CliRunner

from backends.interface import open_runtime
from backends.plugin import BackendConfig, find_backend
from chip_worker.batch import Ready
from chip_worker.config import WorkerConfig
from chip_worker.session import Session
from chip_worker.shard_loader import ShardLoader
from control_plane.scheduling.kv_groups import KVGroups
from scripts.cli.main import main
from tests.fakes.checkpoints import TinyLlama, write_gguf, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, Rank, ThreadRuntime
from tests.fakes.tiny_gemma import TinyGemma

MEMORY_BYTES = 3_000_000
SLOTS, BLOCK_TOKENS, CONTEXT, CHUNK_TOKENS = 64, 4, 128, 32
MODEL = TinyLlama(query_heads=9, kv_heads=3, hidden=64, intermediate=96, tied=False, seed=3)
LAYOUTS = [(1, "cover"), (2, "cover"), (2, "replicate"), (2, "shard")]


class SmallChip(ThreadRuntime):
    """The cpu backend with a limit on what a chip holds."""

    def __init__(self, backend, config):
        super().__init__(backend, replace(config, memory_limit_bytes=MEMORY_BYTES))


def planned(path, *options):
    """What is foretold of two chips: layouts by size and KV policy."""
    words = ["plan", "--model", path, "--dtype", "float32", "--chips", "2", "--json"]
    words += ["--block-tokens", str(BLOCK_TOKENS), "--chunk-tokens", str(CHUNK_TOKENS)]
    words += ["--context", str(CONTEXT), "--max-running", str(SLOTS), *options]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    layouts = json.loads(result.stdout)["layouts"]
    return {(each["size"], policy): each for each in layouts for policy in each["kv_policies"]}


def form(group, policy):
    """Forms a group as the control plane would, and returns what its ranks report."""
    windows = group.ranks[0].session.kv_windows
    wanted = SLOTS * KVGroups(windows, BLOCK_TOKENS, CHUNK_TOKENS).cost(CONTEXT)
    group.form(
        slots=SLOTS,
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        context_tokens=CONTEXT,
        kv_policy=policy,
        blocks_wanted=wanted,
    )
    reports = [rank.last for rank in group.ranks]
    assert all(isinstance(report, Ready) for report in reports), reports
    return wanted, reports


def compare(layout, wanted, reports):
    blocks = min(report.blocks for report in reports)
    assert blocks < wanted, "memory is to decide"
    assert layout["blocks"] == blocks
    held = [rank["weight_bytes"] for rank in layout["ranks"]]
    assert held == [report.weight_bytes for report in reports]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    q4 = gguf.GGMLQuantizationType.Q4_1
    return {
        "llama": write_hugging_face(folder / "llama", MODEL),
        "tied": write_hugging_face(folder / "tied", replace(MODEL, tied=True)),
        "windows": write_hugging_face(folder / "windows", TinyGemma(layers=6)),
        "4 bits": write_gguf(folder / "model.gguf", MODEL, q4),
    }


@pytest.fixture(
    scope="module",
    params=[("llama", "bf16"), ("tied", "bf16"), ("windows", "bf16"), ("4 bits", "native")],
    ids=lambda param: param[0],
)
def plan_of(request, checkpoints):
    """A checkpoint, how its weights are held, and what is foretold of it on small chips."""
    name, weights = request.param
    options = ("--chip-memory", str(MEMORY_BYTES), "--weights", weights)
    return checkpoints[name], weights, planned(checkpoints[name], *options)


@pytest.mark.parametrize(("size", "policy"), LAYOUTS)
def test_workers_of_cpu_chips_take_what_was_foretold(plan_of, size, policy):
    path, weights, layouts = plan_of
    group = ComputeGroup.open(path, size, runtime_class=SmallChip, chips_on_host=2, weights=weights)
    try:
        compare(layouts[size, policy], *form(group, policy))
    finally:
        for rank in group.ranks:
            rank.session.close()


def simulated_rank(path):
    options = {"pace": "off", "memory-bytes": str(MEMORY_BYTES)}
    config = BackendConfig((0,), chips_on_host=2, dtype="float32", options=options)
    backend = find_backend("sim:ideal")
    backend.on_init(config)
    runtime = open_runtime(backend, config)
    reports = []
    worker = WorkerConfig("chip0", "", path, chips_on_host=2)
    session = Session(worker, backend, runtime, ShardLoader(path), reports.append)
    return Rank(session, runtime, backend, reports)


def test_the_worker_of_a_simulated_chip_takes_what_was_foretold(checkpoints):
    path = checkpoints["llama"]
    memory = ("--backend-option", f"memory-bytes={MEMORY_BYTES}", "--backend-option", "pace=off")
    layouts = planned(path, "--backend", "sim:ideal", *memory)
    group = ComputeGroup([simulated_rank(path)])
    try:
        compare(layouts[1, "cover"], *form(group, "cover"))
    finally:
        group.ranks[0].session.close()

"""Memory stays flat however many shapes requests have, on a chip that keeps a buffer for each.

The chip's kernels free such buffers on request only. The worker asks at the end of each request; if
it did not, the alarm would name the operation.
"""

import pytest
from structlog.testing import capture_logs

from backends.interface import open_runtime
from backends.plugin import BackendConfig, find_backend
from chip_worker import memory_watch
from chip_worker.batch import StepRow
from chip_worker.config import WorkerConfig
from chip_worker.session import Session
from chip_worker.shard_loader import ShardLoader
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, Rank, admission

LENGTHS = 200
LENGTHS_LONG = 10_000
BLOCK_TOKENS = 16
COMPUTED_MAX = 7
"""Tokens of a request that are not cached, at most: shapes differ in both."""


@pytest.fixture
def lengths_count(long_run):
    return LENGTHS_LONG if long_run else LENGTHS


@pytest.fixture
def group(tmp_path, lengths_count):
    """A group of one simulated chip whose kernels keep a workspace for every shape."""
    path = write_hugging_face(tmp_path / "model", TinyLlama(layers=1))
    backend = find_backend("sim:p800_shim")
    backend_config = BackendConfig(
        chip_indices=(0,), dtype="float32", options={"pace": "off", "memory-bytes": str(1 << 30)}
    )
    backend.on_init(backend_config)
    runtime = open_runtime(backend, backend_config)
    reports = []
    context = lengths_count + 64
    config = WorkerConfig("chip0", "", path, kv_blocks=context // BLOCK_TOKENS + 8)
    session = Session(config, backend, runtime, ShardLoader(path), reports.append)
    opened = ComputeGroup([Rank(session, runtime, backend, reports)])
    block = backend.capabilities.block_tokens_multiple
    opened.form(block_tokens=max(BLOCK_TOKENS, block), context_tokens=context, slots=2)
    yield opened
    session.close()


def serve_lengths(group, lengths_count):
    """Used bytes of the chip after each request; one request a length, mostly cached."""
    session = group.ranks[0].session
    block = session._formation.form.block_tokens
    device = group.ranks[0].runtime.get_device(0)
    used = []
    for length in range(1, lengths_count + 1):
        computed = min(length, 1 + length % COMPUTED_MAX)
        cached = (length - computed) // block * block
        computed = length - cached
        blocks = -(-length // block)
        for start in range(cached, length, 32):
            first = start == cached
            tokens = min(32, length - start)
            group.step(
                admissions=(
                    admission(
                        [5] * length,
                        cached_count=cached,
                        block_tables=(tuple(range(cached // block)),),
                    ),
                )
                if first
                else (),
                new_blocks=tuple((0, 0, each) for each in range(cached // block, blocks))
                if first
                else (),
                rows=(StepRow(0, tokens, start + tokens == length),),
            )
        group.result(releases=(0,))
        info = device.memory_info()
        used.append(info.total_bytes - info.free_bytes)
    return used


def test_memory_stays_flat_over_many_lengths(group, lengths_count):
    with capture_logs() as logs:
        used = serve_lengths(group, lengths_count)
    assert len(used) == lengths_count
    # Scratch grows with the longest request, and not with their number.
    assert max(used) - min(used) < 256 << 10
    assert not [entry for entry in logs if entry["event"] == "memory.drift"]


def test_without_reclaim_the_alarm_names_the_operation(group, monkeypatch):
    device = group.ranks[0].runtime.get_device(0)
    monkeypatch.setattr(device, "reclaim", lambda _lifetime: None)
    monkeypatch.setattr(memory_watch, "GROWTH_BYTES", 256 << 10)
    monkeypatch.setattr(memory_watch, "WINDOW_STEPS", 32)
    group.form(epoch=2, block_tokens=128, context_tokens=LENGTHS + 64, slots=2)
    before = device.simulated.workspaces.bytes_by_operation()
    with capture_logs() as logs:
        serve_lengths(group, LENGTHS)
    alarms = [entry["operation"] for entry in logs if entry["event"] == "memory.drift"]
    after = device.simulated.workspaces.bytes_by_operation()
    grown = {name: size - before.get(name, 0) for name, size in after.items()}
    assert alarms[0] == max(grown, key=lambda name: grown[name])

"""A worker told to record its backend's primitives: what it logs, and that nothing else changes."""

import pytest
import torch
from structlog.testing import capture_logs

from backends.cpu.plugin import CpuBackend
from backends.errors import BackendError, DeviceError
from backends.interface import BackendConfig
from chip_worker.backend_debug import BACKEND_CALL, BACKEND_LAST_CALLS, with_debug
from chip_worker.batch import Fault
from chip_worker.config import WorkerConfig
from chip_worker.session import Session
from chip_worker.shard_loader import ShardLoader
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, Rank, ThreadRuntime, form_command, token_ids

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("model"), TinyLlama())


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def open_rank(path, debug_backend, debug_backend_calls=256):
    backend_config = BackendConfig(chip_indices=(0,), dtype="float32")
    backend = CpuBackend()
    backend.on_init(backend_config)
    config = WorkerConfig(
        worker_id="chip0",
        control_plane="",
        model_path=path,
        dtype="float32",
        debug_backend=debug_backend,
        debug_backend_calls=debug_backend_calls,
    )
    runtime = ThreadRuntime(backend, backend_config)
    debugged = with_debug(runtime, config)
    reports = []
    session = Session(
        config,
        backend,
        debugged.runtime,
        ShardLoader(path),
        reports.append,
        on_fault=debugged.on_fault,
    )
    return Rank(session, runtime, backend, reports)


def open_group(path, debug_backend, size):
    return ComputeGroup([open_rank(path, debug_backend) for _ in range(size)])


def named(logs):
    return [f"{entry['layer']}.{entry['name']}" for entry in logs if entry["event"] == BACKEND_CALL]


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_is_recorded_in_the_order_of_the_program_and_unchanged(path, size):
    plain = open_group(path, None, size).form().generate(PROMPT, 3)
    with capture_logs():
        group = open_group(path, "*", size).form()
    with capture_logs() as logs:
        recorded = group.generate(PROMPT, 3)
    assert token_ids(recorded) == token_ids(plain)
    assert [row.logits for row in recorded] == [row.logits for row in plain], "to the bit"
    names = iter(named(logs))
    wanted = ["memory.bind", "kernels.embedding"]
    if size > 1:
        wanted += ["collectives.all_reduce", "collectives.wait_stream"]
    wanted += ["kernels.rms_norm", "kernels.linear", "kernels.rotary", "kernels.write_kv"]
    wanted += ["kernels.attention", "kernels.linear"]
    if size > 1:
        wanted += ["collectives.all_reduce"]
    wanted += ["kernels.add_rms_norm", "kernels.silu_mul", "kernels.logits", "kernels.sample"]
    missing = [name for name in wanted if name not in names]
    assert not missing, "each after the one before it"


def test_a_line_has_what_is_needed_to_find_the_call(path):
    rank = open_rank(path, "kernels.embedding")
    with capture_logs():
        rank.session.handle(form_command())
    with capture_logs() as logs:
        ComputeGroup([rank]).generate(PROMPT, 1)
    line = next(entry for entry in logs if entry["event"] == "backend.call")
    model = TinyLlama()
    assert line["log_level"] == "info"
    assert line["worker"] == "chip0"
    assert line["shapes"] == [[len(PROMPT)], [model.vocabulary, model.hidden]]
    assert line["dtypes"] == ["int64", "float32"]
    assert line["implementation"].startswith("native, ")
    assert line["reason"] == "the most preferred"
    assert line["duration_us"] > 0
    assert line["sequence"] > 0


def test_a_fault_logs_the_last_calls_whatever_the_pattern(path, monkeypatch):
    rank = open_rank(path, "memory.zero_blocks", debug_backend_calls=5)
    rank.session.handle(form_command())
    formation = rank.session._formation
    forward = formation._runner.forward

    def fail_afterwards(batch):
        forward(batch)
        raise DeviceError("the chip is ill")

    monkeypatch.setattr(formation._runner, "forward", fail_afterwards)
    with capture_logs() as logs, pytest.raises(AssertionError, match="the chip is ill"):
        ComputeGroup([rank]).generate(PROMPT, 1)
    assert isinstance(rank.last, Fault)
    assert named(logs) == []
    (dump,) = (entry for entry in logs if entry["event"] == BACKEND_LAST_CALLS)
    assert dump["log_level"] == "warning"
    assert dump["worker"] == "chip0"
    assert len(dump["calls"]) == 5
    assert "kernels.add_rms_norm" in dump["calls"][-1]
    sequences = [int(call.split()[0]) for call in dump["calls"]]
    assert sequences == list(range(sequences[0], sequences[0] + 5))


@pytest.mark.parametrize("debugged_rank", [0, 1])
def test_a_group_of_which_some_ranks_debug_is_refused_on_every_rank(path, debugged_rank):
    patterns = [None, None]
    patterns[debugged_rank] = "device.close"
    group = ComputeGroup([open_rank(path, pattern) for pattern in patterns])
    with capture_logs():
        group.form()
    for rank in group.ranks:
        assert isinstance(rank.last, Fault), rank.last
        assert "--debug-backend is given to some ranks" in rank.last.message
        assert f"of 2, to rank {debugged_rank};" in rank.last.message


def test_without_the_option_nothing_is_wrapped(path):
    runtime = ThreadRuntime(CpuBackend(), BackendConfig(chip_indices=(0,)))
    config = WorkerConfig(worker_id="chip0", control_plane="", model_path=path)
    debugged = with_debug(runtime, config)
    assert debugged.runtime is runtime
    with capture_logs() as logs:
        debugged.on_fault()
    assert logs == []


def test_a_pattern_that_selects_nothing_is_refused(path):
    with pytest.raises(BackendError, match="--debug-backend: 'kernel' selects no primitive"):
        open_rank(path, "kernel")

"""A worker whose chip's memory grows says so, and names the operation that keeps it."""

import weakref

import pytest
from structlog.testing import capture_logs

from backends.cpu.device import CpuDevice
from backends.interface import MemoryInfo
from chip_worker import memory_watch
from chip_worker.batch import StepRow
from kernels.spec import Implementation
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, ThreadRuntime, admission

BLOCKS = tuple((0, 0, block) for block in range(16))


class LeakyDevice(CpuDevice):
    """A chip of its own memory, of which kernels keep some for every shape."""

    hidden_bytes = 0

    def memory_info(self):
        used = self._used_bytes + self.hidden_bytes
        return MemoryInfo(1 << 30, (1 << 30) - used)


class LeakyRuntime(ThreadRuntime):
    """`silu_mul` keeps a buffer for every number of rows it meets."""

    def open_device(self, chip):
        self.shapes = set()
        self.leaks = True
        self._engine = self._open_engine(len(chip.cores))
        self.leaky = LeakyDevice(chip, 1 << 30, self._engine)
        return self.leaky

    def implementations(self):
        every = list(super().implementations())
        right = next(each.function for each in every if each.operation == "silu_mul")

        def keeping(gate_up):
            if self.leaks and gate_up.shape[0] not in self.shapes:
                self.shapes.add(gate_up.shape[0])
                self.leaky.hidden_bytes += 64 << 10
            return right(gate_up)

        return [Implementation("silu_mul", "keeping", keeping), *every]


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_watch, "GROWTH_BYTES", 512 << 10)
    monkeypatch.setattr(memory_watch, "WINDOW_STEPS", 32)
    path = write_hugging_face(tmp_path / "model", TinyLlama(layers=1))
    return ComputeGroup.open(path, runtime_class=LeakyRuntime, captured_tokens=0)


def serve_lengths(group, lengths):
    """A request of each length, one after the other; what was logged meanwhile."""
    with capture_logs() as logs:
        for length in lengths:
            group.result(
                admissions=(admission([5] * length),),
                new_blocks=BLOCKS,
                rows=(StepRow(0, length, True),),
            )
            group.result(releases=(0,))
    return [entry for entry in logs if entry["event"] == "memory.drift"]


def test_the_operation_that_keeps_memory_for_every_shape_is_logged_once(group):
    group.form(chunk_tokens=64)
    (alarm, *others) = serve_lengths(group, range(2, 60))
    assert not others
    assert alarm["operation"] == "silu_mul"
    assert alarm["log_level"] == "warning"
    assert alarm["bytes"] >= 64 << 10


def test_memory_that_is_accounted_for_is_no_drift(group):
    group.ranks[0].runtime.leaks = False
    group.form(chunk_tokens=64)
    assert serve_lengths(group, range(2, 60)) == []


@pytest.mark.parametrize("sampled", [True, False])
def test_no_tensor_of_a_step_is_alive_when_memory_is_measured(group, monkeypatch, sampled):
    group.form(chunk_tokens=64)
    formation = group.ranks[0].session._formation
    computed, alive = [], []

    def tracked(right):
        def computing(*arguments):
            found = right(*arguments)
            if found is not None:
                computed.append(weakref.ref(found))
            return found

        return computing

    for name in ("forward", "logits"):
        monkeypatch.setattr(formation._runner, name, tracked(getattr(formation._runner, name)))
    monkeypatch.setattr(
        formation._watch, "observe", lambda: alive.append([each() is not None for each in computed])
    )
    group.step(admissions=(admission([5] * 8),), new_blocks=BLOCKS, rows=(StepRow(0, 8, sampled),))
    assert alive == [[False] * (2 if sampled else 1)]

"""The first sum of a group blames the chip that is wrong, and a chip alone is given back if it is.

The chips are right ones, with something between them and the probe that spoils numbers.
"""

import pytest
import torch

from backends.errors import CommunicatorError, DeviceError
from backends.interface import BackendConfig, BackendRuntime
from backends.plugin import Backend, ChipDescription
from backends.probes import ProbeFailed, probe_communicator
from tests.backends.local_ranks import LocalRanks

DEADLINE_S = 20.0
RANKS = 3


@pytest.fixture(scope="module")
def ranks(backend_name, backend_options, device):  # noqa: ARG001 - as it was, at the end
    opened = LocalRanks(backend_name, RANKS, backend_options)
    yield opened
    opened.close()


class BadCopies:
    """A chip that gets other numbers than were sent to it."""

    def __init__(self, device):
        self.to_host, self.allocate = device.to_host, device.allocate
        self._device = device

    def to_chip(self, source):
        return self._device.to_chip(source + 1)


class BadSums:
    """A rank's communicator whose sums come out wrong for it alone."""

    def __init__(self, inner, device):
        self.rank, self.world_size, self.all_gather = inner.rank, inner.world_size, inner.all_gather
        self._inner, self._device = inner, device

    def all_reduce(self, tensor):
        work = self._inner.all_reduce(tensor)
        work.wait(DEADLINE_S)
        self._device.copy(torch.zeros(tensor.shape), tensor)
        return work


def outcomes(ranks, devices=None, communicators=None):
    """What the probe raises on each rank, or None."""

    def run(rank):
        device = (devices or {}).get(rank, ranks.devices[rank])
        communicator = (communicators or {}).get(rank, ranks.communicators[rank])
        try:
            probe_communicator(communicator, device, DEADLINE_S)
        except (CommunicatorError, DeviceError) as error:
            return error
        return None

    return ranks.together(run)


def test_right_ranks_pass(ranks):
    ranks.form()
    assert outcomes(ranks) == [None] * RANKS


def test_who_brings_wrong_numbers_is_blamed_and_named_by_the_others(ranks):
    ranks.form()
    first, wrong, last = outcomes(ranks, devices={1: BadCopies(ranks.devices[1])})
    assert isinstance(wrong, ProbeFailed)
    assert "rank 1 of 3 brings wrong numbers" in str(wrong)
    for peer in (first, last):
        assert isinstance(peer, CommunicatorError)
        assert "rank 1 of 3" in str(peer)


def test_who_sums_right_numbers_wrongly_is_blamed_alone(ranks):
    ranks.form()
    bad = BadSums(ranks.communicators[2], ranks.devices[2])
    *others, wrong = outcomes(ranks, communicators={2: bad})
    assert others == [None, None]
    assert isinstance(wrong, ProbeFailed)
    assert "rank 2 of 3 sums wrongly" in str(wrong)


class LateWork:
    def __init__(self, limits_s):
        self._limits_s = limits_s

    def wait(self, timeout_s):
        self._limits_s.append(timeout_s)


def test_one_deadline_is_for_all_of_it(ranks, monkeypatch):
    """Half of it passes before the sum is asked for."""
    now = [100.0]
    monkeypatch.setattr("backends.probes.time.monotonic", lambda: now[0])
    limits_s = []

    class Slow:
        rank, world_size = 0, 1

        def all_gather(self, tensor, output):
            ranks.devices[0].copy(tensor, output[0])
            now[0] += 4.0
            return LateWork(limits_s)

        def all_reduce(self, _tensor):
            return LateWork(limits_s)

    ranks.on(0, lambda: probe_communicator(Slow(), ranks.devices[0], 10.0))
    assert limits_s == [10.0, 6.0]


# ---------------------------------------------------------------- chips alone


class VendorBackend(Backend):
    def device_type(self):
        return "abacus"

    def enumerate_chips(self, config):  # noqa: ARG002
        return [ChipDescription(index, f"abacus {index}") for index in range(3)]


class VendorRuntime(BackendRuntime):
    """Chip 0 does not open, chip 1 fails at its first work, both with the vendor's own errors."""

    def __init__(self, right, closing=None):
        config = BackendConfig(chip_indices=(0, 1, 2), dtype="float32")
        super().__init__(VendorBackend(), config)
        self.closed = []
        self._right, self._closing = right, closing

    def open_device(self, chip):
        if chip.index == 0:
            raise RuntimeError("vendor error 719")
        return self._right if chip.index == 2 else self._broken(chip)

    def _broken(self, chip):
        runtime = self

        class Broken:
            def __init__(self):
                self.chip = chip

            def to_chip(self, source):  # noqa: ARG002
                raise OSError("bus error")

            def close(self):
                runtime.closed.append(chip.index)
                if runtime._closing is not None:
                    raise runtime._closing

        return Broken()


@pytest.mark.parametrize("closing", [None, RuntimeError("cannot be closed either")])
def test_vendors_errors_reject_a_chip_close_it_and_leave_the_next(runtime, device, closing):
    vendor = VendorRuntime(device, closing)
    vendor.bind_kernels = runtime.bind_kernels
    acquired = vendor.acquire(1)
    assert acquired.granted == (device,)
    assert acquired.rejected == {0: "RuntimeError: vendor error 719", 1: "OSError: bus error"}
    assert vendor.closed == [1]

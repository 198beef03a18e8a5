"""Steps as native programs on CPU cores: recorded once, computed again and again."""

import random

import pytest
import torch

from backends.cpu.native_kernels import NativeKernels
from backends.cpu.plugin import CpuBackend
from backends.cpu.program import SLAB_BYTES
from backends.errors import UnsupportedOperation
from backends.interface import BackendConfig, Lifetime, open_runtime

HIDDEN, INNER, VOCABULARY = 96, 160, 70


@pytest.fixture
def device():
    config = BackendConfig(chip_indices=(0,), dtype="float32")
    (opened,) = open_runtime(CpuBackend(), config).acquire(1).granted
    if not opened.captures_steps:
        pytest.skip("the native kernels are not built")
    opened.kernels = NativeKernels(opened._engine, None)
    yield opened
    opened.close()


class Chain:
    """Some operations one after the other, as a model calls them."""

    def __init__(self, device, tokens, dtype=torch.float32, calls=None):
        generator = torch.Generator().manual_seed(tokens)
        self.kernels = device.kernels
        self.device = device
        self.calls = calls
        self.ids = torch.zeros(tokens, dtype=torch.int64)

        def matrix(rows, columns):
            return device.to_matrix(torch.randn(rows, columns, generator=generator).to(dtype))

        self.table = matrix(VOCABULARY, HIDDEN)
        self.up, self.down = matrix(2 * INNER, HIDDEN), matrix(HIDDEN, INNER)
        self.norm = torch.rand(HIDDEN, generator=generator).to(dtype)
        self.results = []

    def __call__(self):
        kernels = self.kernels
        residual = kernels.embedding(self.ids, self.table, 0, 1.0)
        hidden = kernels.rms_norm(residual, self.norm, 1e-5)
        for _ in range(3):
            fed = kernels.linear(hidden, self.up, None, None)
            fed = kernels.linear(kernels.silu_mul(fed), self.down, None, None)
            if self.calls is not None:
                self.device.in_order(self.calls, fed)
            hidden, residual = kernels.add_rms_norm(fed, residual, self.norm, 1e-5)
        self.results[:] = [hidden]

    def ask(self, seed):
        self.ids.copy_(
            torch.randint(VOCABULARY, self.ids.shape, generator=torch.Generator().manual_seed(seed))
        )

    def computed(self, seed):
        """What the operations give when they are called one by one."""
        self.ask(seed)
        kept = list(self.results)
        self()
        (found,) = self.results
        self.results[:] = kept
        return found.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_gives_the_bits_of_the_operations_for_other_inputs(device, dtype):
    for tokens in (1, 2, 7, 33):
        chain = Chain(device, tokens, dtype)
        program = device.capture(chain)
        for seed in range(5):
            expected = chain.computed(seed)
            program.replay()
            assert torch.equal(chain.results[0], expected), (tokens, seed)


def test_programs_share_memory_and_compute_right_in_any_order(device):
    chains = [Chain(device, tokens) for tokens in range(1, 20)]
    programs = [device.capture(chain) for chain in chains]
    expected = [chain.computed(seed) for seed, chain in enumerate(chains)]
    order = list(range(len(chains)))
    for seed in range(10):
        random.Random(seed).shuffle(order)
        for index in order:
            chains[index].ask(index)
            programs[index].replay()
            assert torch.equal(chains[index].results[0], expected[index])
    assert device.scratch.bytes_by_operation()["capture"] == SLAB_BYTES


def test_memory_of_programs_that_are_gone_is_used_again(device):
    for tokens in (64, 3, 200, 1) * 20:
        device.capture(Chain(device, tokens)).replay()
    assert device.scratch.bytes_by_operation()["capture"] == SLAB_BYTES
    device.scratch.reclaim(Lifetime.MODEL)
    assert device.scratch.bytes_by_operation() == {}
    chain = Chain(device, 5)
    program = device.capture(chain)
    expected = chain.computed(1)
    program.replay()
    assert torch.equal(chain.results[0], expected)


def test_results_larger_than_a_slab(device):
    chain = Chain(device, 2 * SLAB_BYTES // (8 * INNER))
    program = device.capture(chain)
    expected = chain.computed(3)
    program.replay()
    assert torch.equal(chain.results[0], expected)


def test_calls_of_python_come_at_their_place_at_every_replay(device):
    called = []

    def double(part):
        called.append(part.shape)
        part.mul_(2.0)

    chain = Chain(device, 6, calls=double)
    program = device.capture(chain)
    assert not called
    expected = chain.computed(4)
    assert called == [(6, HIDDEN)] * 3
    program.replay()
    assert called == [(6, HIDDEN)] * 6
    assert torch.equal(chain.results[0], expected)


def test_what_a_call_raises_leaves_the_replay_and_the_next_one_is_whole(device):
    broken = [False]

    def fail(_part):
        if broken[0]:
            raise RuntimeError("the peer is gone")

    chain = Chain(device, 2, calls=fail)
    program = device.capture(chain)
    expected = chain.computed(1)
    broken[0] = True
    with pytest.raises(RuntimeError, match="the peer is gone"):
        program.replay()
    broken[0] = False
    program.replay()
    assert torch.equal(chain.results[0], expected)


def test_after_a_capture_that_fails_operations_are_computed_again(device):
    chain = Chain(device, 3)

    def failing():
        chain()
        device.capture(chain)

    with pytest.raises(UnsupportedOperation, match="a capture within a capture"):
        device.capture(failing)
    ones = torch.ones(2, HIDDEN)
    assert device.kernels.rms_norm(ones, ones[0], 0.0).eq(1.0).all()


def test_what_would_have_to_be_copied_by_torch_is_refused_not_forgotten(device):
    scattered = torch.ones(4, 2 * HIDDEN)[:, ::2]
    with pytest.raises(UnsupportedOperation, match="cannot be captured"):
        device.capture(lambda: device.kernels.rms_norm(scattered, scattered[0].clone(), 0.0))

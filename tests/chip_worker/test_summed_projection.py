"""A product split over ranks has its bias once, whether it travels whole or in chunks."""

import pytest
import torch

import chip_worker.models.summed_projection as module
from chip_worker.models.summed_projection import SummedProjection
from kernels.reference import linear
from tests.fakes.rank_threads import Meeting, ThreadCommunicator, run_ranks

TOKENS, INNER, HIDDEN = 23, 12, 5


class Kernels:
    def function(self, operation):
        assert operation == "linear"
        return linear


class HostMemory:
    """Step memory and its device in one."""

    def __init__(self):
        self.device = self

    def buffer(self, _operation, shape, dtype):
        return torch.full(shape, float("nan"), dtype=dtype)

    def copy(self, source, target):
        target.copy_(source)

    def in_order(self, call, *tensors, native):  # noqa: ARG002
        call(*tensors)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_the_whole_product(monkeypatch, overlaps, ranks):
    monkeypatch.setattr(module, "CHUNK_TOKENS", 4)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, INNER, generator=generator)
    weight = torch.randn(HIDDEN, INNER, generator=generator)
    bias = torch.randn(HIDDEN, generator=generator)
    meeting = Meeting(ranks)
    size = INNER // ranks

    def compute(rank):
        project = SummedProjection(
            Kernels(), ThreadCommunicator(meeting, rank), HostMemory(), overlaps=overlaps
        )
        own = slice(rank * size, (rank + 1) * size)
        return project(x[:, own], weight[:, own], bias if rank == 0 else None)

    for found in run_ranks([lambda rank=rank: compute(rank) for rank in range(ranks)]):
        torch.testing.assert_close(found, x @ weight.T + bias)

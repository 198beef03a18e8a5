"""Two simulated chips compute as one: nothing is read before it has come, on any kind of chip.

What the chips of a group bring to each other is late by nature here: a missing wait reads poison.
"""

import time

import numpy as np
import pytest

from backends.interface import open_runtime
from backends.plugin import BackendConfig, find_backend
from chip_worker.batch import Ready, Rendezvous
from chip_worker.config import WorkerConfig
from chip_worker.models import summed_projection
from chip_worker.session import Session
from chip_worker.shard_loader import ShardLoader
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, Rank, form_command, token_ids
from tests.fakes.rank_threads import run_ranks

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]


def simulated_rank(path, name, index, execution):
    backend = find_backend(name)
    options = {"pace": "off", "execution": execution, "seed": "7"}
    config = BackendConfig(chip_indices=(index,), dtype="float32", options=options)
    backend.on_init(config)
    runtime = open_runtime(backend, config)
    reports = []
    worker = WorkerConfig(f"chip{index}", "", path, kv_blocks=16)
    session = Session(worker, backend, runtime, ShardLoader(path), reports.append)
    return Rank(session, runtime, backend, reports)


@pytest.fixture
def open_pair(tmp_path):
    path = write_hugging_face(tmp_path / "model", TinyLlama(layers=2))
    opened = []

    def form(name, execution):
        ranks = [simulated_rank(path, name, index, execution) for index in range(2)]
        group = ComputeGroup(ranks)
        opened.extend(group.ranks)
        block = group.ranks[0].backend.capabilities.block_tokens_multiple
        commands = [form_command(rank, 2, block_tokens=max(4, block)) for rank in range(2)]
        lead, follower = group.ranks

        def follow():
            follower.session.handle(commands[1])
            give_up = time.monotonic() + 20.0
            while not any(isinstance(each, Rendezvous) for each in lead.reports):
                assert time.monotonic() < give_up
                time.sleep(0.005)
            found = next(each for each in lead.reports if isinstance(each, Rendezvous))
            follower.session.handle(Rendezvous(found.term, found.epoch, found.address))

        run_ranks([lambda: lead.session.handle(commands[0]), follow])
        assert all(isinstance(rank.last, Ready) for rank in group.ranks), lead.reports
        return group

    yield path, form
    for rank in opened:
        rank.session.close()


@pytest.mark.parametrize(
    "name", ["sim:ideal", pytest.param("sim:adversarial", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("execution", ["latest", "random"])
@pytest.mark.parametrize("chunk_tokens", [4, 256])
def test_two_chips_draw_what_one_does(open_pair, monkeypatch, name, execution, chunk_tokens):
    monkeypatch.setattr(summed_projection, "CHUNK_TOKENS", chunk_tokens)
    path, form = open_pair
    expected = ComputeGroup.open(path).form().generate(PROMPT, 4)
    drawn = form(name, execution).generate(PROMPT, 4)
    assert token_ids(drawn) == token_ids(expected)
    for ours, theirs in zip(drawn, expected, strict=True):
        assert logits(ours) == pytest.approx(logits(theirs), abs=1e-4)


def logits(result):
    return np.frombuffer(result.logits, dtype="<f4")

"""A worker's slot tables take every step the scheduler plans, with windows and without.

Method: a driven core plans under memory that is tight; every step goes through both sides' wire
modules into real tables, which check each change and compare the digest after it.
"""

from random import Random

import pytest

from chip_worker import batch
from chip_worker import wire as worker_wire
from chip_worker.slots import SlotTables
from control_plane.config import SchedulingConfig
from control_plane.dispatch import wire
from control_plane.scheduling.kv_groups import KVGroups
from control_plane.scheduling.messages import StepPlan
from protos import worker_pb2
from tests.fakes.driven_core import DrivenCore, reference

SLOTS = 6
CHUNK = 12
CONTEXT = 128


class CountingPool:
    """References to blocks, and nothing in them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._references = [0] * capacity

    @property
    def referenced_count(self) -> int:
        return sum(count > 0 for count in self._references)

    def references(self, block: int) -> int:
        return self._references[block]

    def retain(self, blocks) -> None:
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks) -> None:
        for block in blocks:
            self._references[block] -= 1


def follow(tables: SlotTables, plan: StepPlan, kv_groups_count: int) -> None:
    message = worker_pb2.AttachResponse.FromString(wire.encode_step(plan, 1))
    step = worker_wire.decode_command(message, 0, kv_groups_count)
    assert isinstance(step, batch.Step)
    assert step.digest is not None
    for row in tables.apply(step):
        if row.sampled:
            tables.record(row.slot, 0)


@pytest.mark.parametrize("windows", [(0,), (0, 7), (6,), (0, 0, 10, 5)])
@pytest.mark.parametrize("seed", range(2))
def test_worker_tables_take_every_step(windows: tuple[int, ...], seed: int) -> None:
    random, block_tokens = Random(seed), 4
    config = SchedulingConfig(
        block_tokens=block_tokens, chunk_tokens=CHUNK, running_max=SLOTS, digest_interval_steps=1
    )
    blocks = 2 * KVGroups(windows, block_tokens, CHUNK).cost(60)
    core = DrivenCore(config, blocks, kv_windows=windows).serve(context_tokens=CONTEXT)
    pool = CountingPool(blocks)
    tables = SlotTables(SLOTS, CONTEXT, block_tokens, pool, CHUNK + SLOTS, windows)
    system = [random.randrange(1000) for _ in range(20)]
    prompts = {
        f"r{i}": [*system[: random.choice([0, 13, 20])], i, *range(random.randint(0, 25))]
        for i in range(16)
    }
    for name, prompt in prompts.items():
        core.submit(name, prompt, max_tokens=15)
    followed = 0
    while core.in_flight() or followed < len(core.plans):
        for plan in core.plans[followed:]:
            follow(tables, plan, len(windows))
            followed += 1
        if core.in_flight():
            core.finish_step()
            core._end_complete()
    assert not tables.occupied()
    tables.end()
    assert any(plan.drops for plan in core.plans) == any(windows)
    assert any(a.cached_count for plan in core.plans for a in plan.admissions)
    for name, prompt in prompts.items():
        assert core.outputs[name] == reference(prompt, 15)

"""The steps a sweep asks for: what fits the group, and that a worker's tables take them."""

import asyncio

import pytest

from backends.block_references import BlockReferences
from chip_worker import wire as worker_wire
from chip_worker.slots import SlotTables
from control_plane.dispatch import wire
from control_plane.scheduling.messages import WorkerInfo
from control_plane.scheduling.step_time import StepWork, context_of_chunk
from protos import worker_pb2
from scripts.calibration.calibration_file import StepTime
from scripts.calibration.measured_group import CalibrationFailed
from scripts.calibration.sweep import Extent, Sweeper, Watcher

COST = StepTime(0.01, 1e-3, 0.0, 1e-3, 0.0)
BLOCK_TOKENS = 16


class ModelledGroup:
    """A group whose steps go through a worker's tables and take what the cost model says."""

    def __init__(self, *, blocks=512, slots=9, context=1024, windows=(0,), chunk=256, cost=COST):
        self.worker = WorkerInfo(
            *("chip0", 1, 1, "cpu", "modelled", "float32", "", context, 100), kv_windows=windows
        )
        self.slots, self.blocks, self.block_tokens = slots, blocks, BLOCK_TOKENS
        self.prefill_tokens_per_s = 1000.0
        self.computed = []
        self.slow_number = 0
        self._cost = cost
        self._pool = BlockReferences(blocks)
        self._tables = SlotTables(
            slots, context, BLOCK_TOKENS, self._pool, chunk + slots, kv_windows=windows
        )

    async def compute(self, plan):
        message = worker_pb2.AttachResponse.FromString(wire.encode_step(plan, term=1))
        windows = len(self.worker.kv_windows)
        rows = self._tables.apply(worker_wire.decode_command(message, 0, windows))
        for row in rows:
            if row.sampled:
                self._tables.record(row.slot, 0)
        chunks = [row for row in rows if row.stop - row.start > 1]
        decodes = [row for row in rows if row.stop - row.start == 1]
        work = StepWork(
            sum(row.stop - row.start for row in chunks),
            sum(context_of_chunk(row.start, row.stop - row.start) for row in chunks),
            len(decodes),
            sum(row.stop for row in decodes),
        )
        self.computed.append(work)
        is_slow = self.computed.count(work) == self.slow_number
        return self._cost.predict(work) * (2.0 if is_slow else 1.0)


def swept(group, chunks=(64, 256), batches=(1, 4, 8), position=100, watcher=None, **fields):
    extent = Extent(tuple(chunks), tuple(batches), position, fields.pop("repeats", 2))
    deadline_s = fields.pop("step_deadline_s", 1000.0)
    return asyncio.run(Sweeper(group, extent, deadline_s, watcher or Watcher()).measure())


@pytest.mark.parametrize("windows", [(0,), (0, 32), (32, 0, 64)])
def test_every_step_is_one_a_worker_takes_and_is_measured_as_the_work_it_is(windows):
    group = ModelledGroup(windows=windows)
    sweep = swept(group)
    assert [point.work.chunk_tokens for point in sweep.chunks] == [64, 256]
    assert [point.work.decode_rows for point in sweep.batches] == [1, 4, 8]
    for point in sweep.points:
        # As often as it was to be measured, and as the first time: just this work.
        assert group.computed.count(point.work) >= 3
        assert point.seconds == pytest.approx(COST.predict(point.work))
    assert sweep.remarks == ()


def test_chunks_of_every_size_attend_to_as_much_for_each_token():
    sweep = swept(ModelledGroup(), chunks=(64, 128, 256))
    assert {point.work.chunk_context / point.work.chunk_tokens for point in sweep.chunks} == {128.5}
    assert sweep.prompt_tokens == 256


def test_others_tell_the_terms_apart():
    sweep = swept(ModelledGroup())
    chunks = [p.work for p in sweep.others if p.work.chunk_tokens and not p.work.decode_rows]
    mixed = [p.work for p in sweep.others if p.work.chunk_tokens and p.work.decode_rows]
    decodes = [p.work for p in sweep.others if not p.work.chunk_tokens]
    assert {work.decode_context // work.decode_rows for work in decodes} == {13}
    assert mixed
    assert not {*chunks, *mixed, *decodes} & {p.work for p in (*sweep.chunks, *sweep.batches)}


def test_what_is_attended_to_was_computed_before():
    """Blocks that were never written would be read faster."""
    group = ModelledGroup()
    swept(group, position=100)
    first_decode = next(i for i, work in enumerate(group.computed) if work.decode_rows > 1)
    filled = sum(work.chunk_tokens for work in group.computed[:first_decode])
    assert filled >= 256 + 8 * 100


@pytest.mark.parametrize(
    ("limits", "chunks", "batches", "position", "remark"),
    [
        ({"context": 128}, [64, 128], [1, 4, 8], 100, "--chunks: the context and KV memory hold"),
        ({"context": 64}, [64], [1, 4, 8], 63, "--position 100 is more than the model's context"),
        ({"slots": 3}, [64, 256], [1, 3], 100, "take 3 rows, which was measured instead of 4, 8"),
        ({"blocks": 35}, [64, 256], [1, 4, 5], 100, "take 5 rows"),
        ({"blocks": 10}, [64, 160], [1], 100, "hold 160 tokens, which was measured instead of 256"),
        ({"blocks": 20, "windows": (0, 32)}, [64, 160], [1], 100, "hold 160 tokens"),
    ],
)
def test_what_does_not_fit_is_cut_to_what_does(limits, chunks, batches, position, remark):
    sweep = swept(ModelledGroup(**limits))
    assert [point.work.chunk_tokens for point in sweep.chunks] == chunks
    assert [point.work.decode_rows for point in sweep.batches] == batches
    assert sweep.position == position
    assert any(remark in each for each in sweep.remarks), sweep.remarks
    assert sweep.limited == {
        option
        for option, taken, most in (("--chunks", chunks, 256), ("--batches", batches, 8))
        if max(taken) < most
    }


def test_memory_that_does_not_hold_a_row_is_an_error_with_the_remedy():
    with pytest.raises(CalibrationFailed, match=r"take 0 rows; give more --kv-blocks"):
        swept(ModelledGroup(blocks=3))


def test_how_many_requests_memory_holds_counts_only_where_it_holds_less_than_all():
    assert swept(ModelledGroup(blocks=35)).rows_held == 5
    # 9 requests of the whole context.
    assert swept(ModelledGroup(blocks=9 * 64)).rows_held is None


def test_a_chunk_that_would_take_most_of_the_deadline_is_not_tried():
    """0.01 s and 1 ms a token: 64 tokens 0.07 s, 256 about 0.3 s, half of the deadline 0.2 s."""
    group = ModelledGroup()
    sweep = swept(group, step_deadline_s=0.4)
    assert [point.work.chunk_tokens for point in sweep.chunks] == [64]
    assert max(work.chunk_tokens for work in group.computed) < 256
    assert any("chunks from 256 tokens on were left out" in each for each in sweep.remarks)
    assert any("--step-deadline" in each for each in sweep.remarks)
    assert sweep.limited == {"--chunks"}


def test_a_deadline_that_measured_steps_exceed_is_told():
    """A chunk of 256 takes 0.266 s."""
    (remark,) = swept(ModelledGroup(), chunks=(256,), step_deadline_s=0.5).remarks
    assert "takes 0.27" in remark
    assert "more than half of --step-deadline 0.5" in remark
    assert swept(ModelledGroup(), chunks=(256,), step_deadline_s=0.6).remarks == ()


def test_on_a_busy_machine_medians_are_taken_and_it_is_said():
    group = ModelledGroup()
    group.slow_number = 3
    sweep = swept(group, repeats=3)
    usual = [p for p in sweep.points if p.seconds == pytest.approx(COST.predict(p.work))]
    assert len(usual) == len(sweep.points)
    (remark,) = sweep.remarks
    assert "a step takes 2.0 times as long at one time as at another" in remark
    assert "--repeats" in remark


def test_a_worker_without_times_is_an_error():
    with pytest.raises(CalibrationFailed, match="chip0 does not tell how long"):
        swept(ModelledGroup(cost=StepTime(0.0, 0.0, 0.0, 0.0, 0.0)))


def test_the_watcher_learns_how_far_it_is():
    class Noting(Watcher):
        total, done, parts = 0, 0, ()

        def on_begin(self, tokens_count, prefill_tokens_per_s):
            self.total = tokens_count
            assert prefill_tokens_per_s == 1000.0

        def on_next(self, part, what=""):
            assert bool(what) == (part != "filling KV memory")
            self.parts = tuple(dict.fromkeys((*self.parts, part)))

        def on_step(self, tokens_count):
            self.done += tokens_count

    watcher = Noting()
    swept(ModelledGroup(), watcher=watcher)
    assert watcher.parts == ("filling KV memory", "first run", "run 1 of 2", "run 2 of 2")
    assert watcher.done == pytest.approx(watcher.total, rel=0.1)

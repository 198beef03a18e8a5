"""The session keeps the protocol: forming, fencing, faults, ends."""

import threading
import time
import weakref

import pytest
import torch

from backends.communicator import SingleRankCommunicator
from backends.cpu.plugin import CpuBackend
from backends.cpu.runtime import CpuRuntime
from backends.errors import (
    BackendUnavailable,
    CommunicatorTimeout,
    DeviceError,
    DeviceHung,
    DeviceLost,
    OutOfMemory,
    PeerLost,
)
from backends.interface import AcquiredDevices
from chip_worker.batch import (
    Fault,
    FaultKind,
    Ready,
    Rendezvous,
    ResetEpoch,
    RowWants,
    Shutdown,
    Step,
    StepAck,
    StepResult,
    StepRow,
)
from chip_worker.faults import fault_kind
from chip_worker.models.llama import LlamaModel
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import (
    ComputeGroup,
    admission,
    form_command,
    open_rank,
    token_ids,
)
from tests.fakes.rank_threads import Meeting, run_ranks

PROMPT = [1, 2, 3, 4, 5]


class RecordingBackend(CpuBackend):
    """A cpu backend that remembers which hooks were called; public overrides would be refused."""

    def __init__(self):
        super().__init__()
        self._calls = []

    def on_model_load(self, plan):
        self._calls.append(("load", plan.rank, plan.world_size, plan.weight_bytes))

    def on_request_end(self, slot):
        self._calls.append(("end", slot))

    def on_fault(self, event):
        self._calls.append(("fault", event.step_id, type(event.error).__name__))

    def on_shutdown(self):
        self._calls.append(("shutdown",))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("model"), TinyLlama())


def started(path, **settings):
    backend = RecordingBackend()
    rank = open_rank(path, backend=backend, **settings)
    rank.session.handle(form_command())
    assert isinstance(rank.last, Ready), rank.last
    return rank, backend


def first_step(step_id=1, term=1, epoch=1, **changes):
    fields = {
        "admissions": (admission(PROMPT),),
        "new_blocks": ((0, 0, 0), (0, 0, 1)),
        "rows": (StepRow(0, 5, True),),
    }
    return Step(term, epoch, step_id, **(fields | changes))


def fault_of(rank):
    assert isinstance(rank.last, Fault), rank.last
    return rank.last


def test_ready_says_what_was_measured_and_allotted(path):
    rank, backend = started(path)
    ready = rank.last
    assert (ready.term, ready.epoch) == (1, 1)
    assert ready.blocks == 4 * 16, "every slot with a full context"
    assert ready.prefill_tokens_per_s > 0
    assert ready.decode_step_s > 0
    assert backend._calls == [("load", 0, 1, ready.weight_bytes)]


def test_kv_blocks_is_obeyed(path):
    rank, _ = started(path, kv_blocks=5)
    assert rank.last.blocks == 5


def test_ranks_with_pools_of_different_size_form_a_group(path):
    ranks = [open_rank(path, kv_blocks=blocks) for blocks in (30, 3)]
    ComputeGroup(ranks).form()
    assert [rank.last.blocks for rank in ranks] == [30, 3]


def test_no_memory_for_a_block_is_a_fault_with_a_remedy(path):
    rank = open_rank(path, kv_memory_fraction=1e-9)
    rank.session.handle(form_command())
    fault = fault_of(rank)
    assert fault.kind is FaultKind.OUT_OF_MEMORY
    assert "--kv-blocks" in fault.message


def test_a_step_reports_rows_and_times(path):
    rank, _ = started(path)
    received_ns = time.monotonic_ns()
    rank.session.handle(first_step(received_ns=received_ns))
    result = rank.last
    assert isinstance(result, StepResult)
    assert result.step_id == 1
    assert len(result.rows) == 1
    assert 0 < result.times.queue_ns < result.times.device_ns + 10**9
    assert result.times.gap_ns == 0
    rank.session.handle(Step(1, 1, 2, rows=(StepRow(0, 1, True),)))
    assert rank.last.times.gap_ns > 0


def test_only_rank_0_returns_tokens_and_all_ranks_go_on_with_them(path):
    group = ComputeGroup.open(path, 2).form()
    alone = ComputeGroup.open(path).form().generate(PROMPT, 4)
    assert token_ids(group.generate(PROMPT, 4)) == token_ids(alone)
    ack = group.ranks[1].last
    assert isinstance(ack, StepAck)
    assert [times.step_id for times in ack.times] == [4]
    assert ack.times[0].communication_ns > 0


def test_log_probabilities_and_logits_come_only_where_wanted(path):
    rank, _ = started(path)
    quiet = admission(PROMPT, wants=RowWants())
    rank.session.handle(first_step(admissions=(quiet,)))
    (row,) = rank.last.rows
    assert row.logprobs == ()
    assert row.tops == ()
    assert rank.last.prompt_scores == ()
    assert row.logits is None
    assert row.finite


def test_a_step_may_only_release(path):
    rank, backend = started(path)
    rank.session.handle(first_step())
    rank.session.handle(Step(1, 1, 2, releases=(0,), digest=0))
    assert rank.last.rows == ()
    assert backend._calls[-1] == ("end", 0)


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (first_step(step_id=2), "step 2 came after step 0"),
        (first_step(epoch=2), "epoch 2"),
        (first_step(term=2), "term 2"),
        (first_step(digest=1), "digest"),
        (first_step(rows=(StepRow(0, 6, True),)), "knows 5"),
    ],
)
def test_a_step_that_does_not_match_ends_the_epoch(path, step, says):
    rank, backend = started(path)
    rank.session.handle(step)
    fault = fault_of(rank)
    assert fault.kind is FaultKind.DIVERGED
    assert (fault.term, fault.epoch) == (1, 1)
    assert says in fault.message
    assert ("fault", step.step_id, "DivergedError") in backend._calls
    before = len(rank.reports)
    rank.session.handle(first_step())
    assert len(rank.reports) == before, "what was sent before the fault was seen is dropped"


def test_a_repeated_step_is_refused(path):
    rank, _ = started(path)
    rank.session.handle(first_step())
    rank.session.handle(first_step())
    assert fault_of(rank).kind is FaultKind.DIVERGED


def test_a_step_outside_any_epoch_is_refused(path):
    rank = open_rank(path)
    rank.session.handle(first_step())
    assert fault_of(rank).kind is FaultKind.DIVERGED


def test_after_a_fault_a_new_epoch_serves_with_the_weights_kept(path):
    rank, backend = started(path)
    weights = rank.session._loader.loaded
    rank.session.handle(first_step(digest=1))
    rank.session.handle(form_command(epoch=2))
    assert isinstance(rank.last, Ready)
    assert rank.session._loader.loaded is weights
    rank.session.handle(first_step(epoch=2))
    assert isinstance(rank.last, StepResult)
    assert ("end", 0) in backend._calls, "the slots of a dropped epoch end too"


def test_another_place_in_a_group_loads_another_shard(path):
    rank, _ = started(path)
    whole_bytes = rank.last.weight_bytes
    rank.session.handle(ResetEpoch(1, 1, "grow"))
    group = ComputeGroup([rank, open_rank(path)]).form(epoch=2)
    assert all(member.last.weight_bytes < whole_bytes for member in group.ranks)
    assert len(group.generate(PROMPT, 2)) == 2


@pytest.mark.parametrize("stale", [{"epoch": 1}, {"epoch": 0}, {"term": 0, "epoch": 9}])
def test_an_old_formation_is_refused(path, stale):
    rank, _ = started(path)
    rank.session.handle(form_command(**stale))
    assert fault_of(rank).kind is FaultKind.DIVERGED


def test_another_group_counts_its_epochs_for_itself(path):
    rank, _ = started(path)
    rank.session.handle(form_command(epoch=5))
    rank.session.handle(form_command(group_id="g1", epoch=1))
    assert isinstance(rank.last, Ready)


def test_a_reset_while_waiting_for_the_meeting_point_ends_the_wait(path):
    rank = open_rank(path)
    rank.session.handle(form_command(rank=1, world_size=2))
    rank.session.handle(ResetEpoch(1, 1, "rank 0 was lost"))
    rank.session.handle(Rendezvous(1, 1, b"meeting"))
    assert rank.reports == []
    rank.session.handle(form_command(epoch=2))
    assert isinstance(rank.last, Ready)


def test_rank_0_of_several_reports_its_meeting_point_first(path):
    group = ComputeGroup.open(path, 2).form()
    lead, follower = (rank.reports for rank in group.ranks)
    assert lead[0] == Rendezvous(1, 1, b"meeting")
    assert [type(report) for report in follower] == [Ready]


def test_a_reset_ends_the_epoch_and_its_requests(path):
    rank, backend = started(path)
    rank.session.handle(first_step())
    rank.session.handle(ResetEpoch(1, 1, "a peer was lost"))
    assert backend._calls[-1] == ("end", 0)
    rank.session.handle(Step(1, 1, 2))
    assert fault_of(rank).kind is FaultKind.DIVERGED


def test_a_reset_of_an_earlier_epoch_changes_nothing(path):
    rank, _ = started(path)
    rank.session.handle(form_command(epoch=2))
    rank.session.handle(ResetEpoch(1, 1, "late"))
    rank.session.handle(first_step(epoch=2))
    assert isinstance(rank.last, StepResult)


def test_a_group_too_large_is_a_model_fault(path):
    rank = open_rank(path)
    rank.session.handle(form_command(world_size=7))
    fault = fault_of(rank)
    assert fault.kind is FaultKind.MODEL
    assert "1 to 6" in fault.message


def test_a_missing_peer_is_a_peer_fault_and_abort_shortens_the_wait(path):
    group = ComputeGroup.open(path, 2).form()
    lead = group.ranks[0]
    thread = threading.Thread(target=lead.session.handle, args=(first_step(),))
    started_s = time.monotonic()
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive(), "rank 0 waits for rank 1"
    lead.session.abort(form_command())
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert time.monotonic() - started_s < 5
    assert fault_of(lead).kind is FaultKind.PEER


def test_a_rank_that_waits_for_others_to_join_can_be_called_back(path, monkeypatch):
    rank = open_rank(path)
    joined, closed = threading.Event(), threading.Event()

    class LateCommunicator(SingleRankCommunicator):
        def close(self):
            closed.set()

    def wait_for_others(*_arguments):
        joined.wait(timeout=20)
        return LateCommunicator()

    monkeypatch.setattr(rank.runtime, "create_communicator", wait_for_others)
    thread = threading.Thread(target=rank.session.handle, args=(form_command(world_size=2),))
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive(), "rank 0 waits for rank 1"
    rank.session.abort(form_command())
    thread.join(timeout=10)
    assert fault_of(rank).kind is FaultKind.PEER
    joined.set()
    assert closed.wait(timeout=10), "a communicator that comes too late is closed"


def test_an_epoch_that_ends_while_weights_load_is_not_waited_for(path, monkeypatch):
    rank = open_rank(path)
    load = LlamaModel.load

    def load_while_the_epoch_ends(*arguments):
        rank.session.abort(form_command())
        return load(*arguments)

    monkeypatch.setattr(LlamaModel, "load", staticmethod(load_while_the_epoch_ends))
    started_s = time.monotonic()
    rank.session.handle(form_command(world_size=2))
    assert time.monotonic() - started_s < 10
    assert fault_of(rank).kind is FaultKind.PEER
    monkeypatch.undo()
    rank.session.handle(form_command(epoch=2))
    assert isinstance(rank.last, Ready)


def test_an_epoch_that_ends_before_its_formation_is_begun_is_not_waited_for(path):
    rank = open_rank(path)
    rank.session.abort(form_command(world_size=2))
    started_s = time.monotonic()
    rank.session.handle(form_command(world_size=2))
    assert time.monotonic() - started_s < 10
    assert fault_of(rank).kind is FaultKind.PEER


def test_ranks_meet_through_the_communicator_of_the_backend(path):
    ranks = [open_rank(path, runtime_class=CpuRuntime) for _ in range(2)]
    commands = [form_command(rank, 2) for rank in range(2)]
    follower = ranks[1].session

    def lead():
        ranks[0].session.handle(commands[0])

    def follow():
        follower.handle(commands[1])
        while not ranks[0].reports:
            time.sleep(0.01)
        follower.handle(ranks[0].reports[0])

    run_ranks([lead, follow])
    found = ComputeGroup(ranks).generate(PROMPT, 4)
    assert token_ids(found) == token_ids(ComputeGroup.open(path).form().generate(PROMPT, 4))
    for rank in ranks:
        rank.session.close()


class ProbedCommunicator(SingleRankCommunicator):
    """One of two ranks, whose first sum does what the test says."""

    def __init__(self, first_sum):
        super().__init__()
        self.world_size = 2
        self.closed = False
        self.aborted = threading.Event()
        self._first_sum = first_sum

    def all_reduce(self, _tensor):
        self._first_sum(self)
        raise AssertionError("the probe goes no further")

    def abort(self):
        self.aborted.set()

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DeviceError("the link is down"), FaultKind.DEVICE),
        (CommunicatorTimeout("no answer"), FaultKind.PEER),
    ],
)
def test_a_group_is_probed_before_it_is_warmed_up(path, monkeypatch, error, kind):
    def fail(_communicator):
        assert rank.session.is_probing
        raise error

    rank, communicator = open_rank(path), ProbedCommunicator(fail)
    monkeypatch.setattr(rank.runtime, "create_communicator", lambda *_: communicator)
    rank.session.handle(form_command(world_size=2))
    assert (fault_of(rank).kind, fault_of(rank).message) == (kind, str(error))
    assert communicator.closed
    assert not rank.session.is_probing
    monkeypatch.undo()
    rank.session.handle(form_command(epoch=2))
    assert isinstance(rank.last, Ready), "a rank alone needs no probe"


def test_a_probe_that_hangs_can_be_called_back(path, monkeypatch):
    def hang(communicator):
        assert communicator.aborted.wait(20)
        raise CommunicatorTimeout("aborted")

    rank, communicator = open_rank(path), ProbedCommunicator(hang)
    monkeypatch.setattr(rank.runtime, "create_communicator", lambda *_: communicator)
    thread = threading.Thread(target=rank.session.handle, args=(form_command(world_size=2),))
    thread.start()
    while not rank.session.is_probing:
        time.sleep(0.01)
    rank.session.abort(form_command(world_size=2))
    thread.join(timeout=10)
    assert fault_of(rank).kind is FaultKind.PEER


def test_a_chip_that_cannot_be_opened_is_told_with_every_reason(path, monkeypatch):
    found = AcquiredDevices((), {0: "no memory", 1: "no link"})
    monkeypatch.setattr(CpuRuntime, "acquire", lambda *_: found)
    with pytest.raises(BackendUnavailable, match="chip 0: no memory; chip 1: no link"):
        open_rank(path)


def test_abort_without_an_epoch_is_harmless(path):
    open_rank(path).session.abort(form_command())


def test_an_unexpected_error_is_internal_and_leaves_a_usable_session(path, monkeypatch):
    rank, _ = started(path)

    def broken(_step):
        raise RuntimeError("a bug")

    monkeypatch.setattr(rank.session._formation, "run", broken)
    rank.session.handle(first_step())
    fault = fault_of(rank)
    assert (fault.kind, fault.message, fault.exiting) == (FaultKind.INTERNAL, "a bug", False)
    rank.session.handle(form_command(epoch=2))
    assert isinstance(rank.last, Ready)


def test_a_fault_lets_go_at_once_of_what_the_step_worked_on(path, monkeypatch):
    rank, _ = started(path)
    kept_errors, held = [], []

    def broken(_step):
        tensor = torch.zeros(1)
        held.append(weakref.ref(tensor))
        kept_errors.append(PeerLost("gone"))
        raise kept_errors[0]

    monkeypatch.setattr(rank.session._formation, "run", broken)
    rank.session.handle(first_step())
    assert fault_of(rank).message == "gone"
    assert held[0]() is None


@pytest.mark.parametrize("error", [DeviceLost("it fell off the bus"), DeviceHung("no answer")])
def test_a_chip_that_is_lost_or_hangs_ends_the_process(path, monkeypatch, error):
    """A hang is told when the epoch is long over, and then only what ends the process counts."""
    rank, _ = started(path)

    def lost(_step):
        raise error

    monkeypatch.setattr(rank.session._formation, "run", lost)
    rank.session.handle(first_step())
    assert fault_of(rank).kind is FaultKind.DEVICE
    assert fault_of(rank).exiting


def test_errors_of_the_backend_have_their_kinds():
    assert fault_kind(OutOfMemory("full")) is FaultKind.OUT_OF_MEMORY
    assert fault_kind(PeerLost("gone")) is FaultKind.PEER
    assert fault_kind(KeyError("x")) is FaultKind.INTERNAL


def test_shutdown_and_close_give_everything_back(path):
    rank, backend = started(path)
    rank.session.handle(first_step())
    rank.session.handle(Shutdown("bye"))
    rank.session.close()
    assert backend._calls[-2:] == [("end", 0), ("shutdown",)]


def test_a_communicator_that_cannot_be_made_is_a_peer_fault(path, monkeypatch):
    rank = open_rank(path)
    rank.runtime.meeting = Meeting(2)

    def refuse(*_arguments):
        raise PeerLost("rank 0 is gone")

    monkeypatch.setattr(rank.runtime, "create_communicator", refuse)
    rank.session.handle(form_command(rank=1, world_size=2))
    rank.session.handle(Rendezvous(1, 1, b"meeting"))
    assert fault_of(rank).kind is FaultKind.PEER

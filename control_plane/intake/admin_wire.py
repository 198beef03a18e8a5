"""From the core's snapshot and verdicts to the messages of AdminService."""

from collections.abc import Sequence
from typing import NamedTuple

from control_plane.scheduling.messages import (
    BlockCounts,
    Condemn,
    GroupSnapshot,
    Snapshot,
    WorkerSnapshot,
)
from protos import admin_pb2


class FrontendSnapshot(NamedTuple):
    """A frontend as protos/admin.proto tells it."""

    name: str
    pid: int
    state: str
    lost_pid: int
    lost_status: int


def status_response(
    snapshot: Snapshot,
    *,
    intake_count: int,
    term: int,
    version: str,
    frontends: Sequence[FrontendSnapshot] = (),
) -> admin_pb2.GetStatusResponse:
    """The core's snapshot, intake's table size and its processes as a message."""
    return admin_pb2.GetStatusResponse(
        workers=[_worker(worker) for worker in snapshot.workers],
        groups=[_group(group) for group in snapshot.groups],
        requests=admin_pb2.RequestTables(
            intake=intake_count,
            scheduling=snapshot.requests,
            waiting=snapshot.waiting,
            running=snapshot.running,
            steps_in_flight=sum(group.steps_in_flight for group in snapshot.groups),
        ),
        generated_tokens=snapshot.generated_tokens,
        term=term,
        version=version,
        failovers=snapshot.failovers,
        frontends=[
            admin_pb2.FrontendStatus(
                id=each.name,
                pid=each.pid,
                state=each.state,
                lost_pid=each.lost_pid,
                lost_status=each.lost_status,
            )
            for each in frontends
        ],
    )


def _worker(worker: WorkerSnapshot) -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(
        id=worker.worker_id,
        pid=worker.pid,
        incarnation=worker.incarnation,
        state=worker.state,
        device=worker.device,
        group=worker.group_id,
        backend=worker.backend,
        heartbeat_age_s=worker.heartbeat_age_s,
        blocks=worker.blocks,
        reason=worker.reason,
        device_id=worker.device_id,
        chip_index=worker.chip_index,
    )


def _group(group: GroupSnapshot) -> admin_pb2.GroupStatus:
    return admin_pb2.GroupStatus(
        id=group.group_id,
        epoch=group.epoch,
        ranks=group.worker_ids,
        state=group.state,
        running=group.running,
        waiting=group.waiting,
        retracted=group.retracted,
        blocks=_blocks(group.blocks),
        block_tokens=group.block_tokens,
        steps=group.steps,
    )


def _blocks(blocks: BlockCounts) -> admin_pb2.BlockCounts:
    return admin_pb2.BlockCounts(
        free=blocks.free, cached=blocks.cached, referenced=blocks.referenced, total=blocks.total
    )


def verdict(condemn: Condemn) -> admin_pb2.Verdict:
    """A condemned process as a message."""
    return admin_pb2.Verdict(
        worker_id=condemn.worker_id,
        incarnation=condemn.incarnation,
        pid=condemn.pid,
        reason=condemn.reason,
    )

"""A chip group as the control plane keeps it, and who of its workers can make up its next epoch.

workers' states --muster--> members, those to go without, those to wait for --> GroupEpochs forms
"""

from dataclasses import dataclass, field
from enum import Enum

from control_plane.scheduling.worker_table import Worker, WorkerState, WorkerTable

CORDONED_REASON = "cordoned after too many faults of its own"
MISMATCHED_REASON = (
    "its model differs from that of the others (another model digest or attention window, or other "
    "--weights)"
)


class GroupState(Enum):
    """What a group is doing."""

    WAITING = "waiting"  # for its workers
    FORMING = "forming"
    SERVING = "serving"


@dataclass(slots=True)
class ChipGroup:
    """One group; epoch is 0 before the first. failures: epochs in a row without a finished step.

    worker_ids: all that belong to it. ranks: those of the present epoch, in order; empty while it
    waits. out: ranks that cannot go on in an epoch that is about to end, and ended_by the reason.
    given_up: workers that did not come in time, until they come, each with what is said of it.
    """

    group_id: str
    worker_ids: tuple[str, ...]
    ranks: tuple[str, ...] = ()
    state: GroupState = GroupState.WAITING
    epoch: int = 0
    block_tokens: int = 0
    slots_count: int = 0
    failures: int = 0
    retry_at: float = 0.0
    rendezvous_opened: bool = False
    out: set[str] = field(default_factory=set)
    ended_by: str = ""
    given_up: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Muster:
    """members: who can be a rank, in order. missing: who cannot, and why. awaited: who may come."""

    members: tuple[Worker, ...]
    missing: dict[str, str]
    awaited: tuple[str, ...]


def muster(group: ChipGroup, workers: WorkerTable) -> Muster:
    """Looks at every worker of a group that waits; changes nothing."""
    members: list[Worker] = []
    missing: dict[str, str] = {}
    awaited: list[str] = []
    for worker_id in group.worker_ids:
        worker = workers.get(worker_id)
        state = worker.state if worker else WorkerState.LOST
        if worker and state is WorkerState.IDLE:
            members.append(worker)
        elif worker and state is WorkerState.UNAVAILABLE:
            missing[worker_id] = worker.reason
        elif state is WorkerState.CORDONED:
            missing[worker_id] = CORDONED_REASON
        elif state is WorkerState.MISMATCHED:
            missing[worker_id] = MISMATCHED_REASON
        elif worker_id in group.given_up:
            missing[worker_id] = group.given_up[worker_id]
        else:
            awaited.append(worker_id)
    return Muster(tuple(members), missing, tuple(awaited))

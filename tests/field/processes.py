"""What the kernel says of the service's processes."""

from pathlib import Path

from tests.field.field_cluster import FieldCluster


def child_pids(pid: int) -> list[int]:
    """Processes whose parent this is."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += map(int, (task / "children").read_text().split())
    return children


def control_plane_pid(field: FieldCluster) -> int:
    """The control plane: the launcher's child that is no worker."""
    (pid,) = set(child_pids(field.cluster.pid)) - set(field.worker_pids().values())
    return pid


def service_pids(field: FieldCluster) -> dict[str, int]:
    """The control plane and every worker, by name."""
    return {"control plane": control_plane_pid(field), **field.worker_pids()}


def memory_bytes(pid: int) -> int:
    """Anonymous memory of a process, swapped out or not."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"

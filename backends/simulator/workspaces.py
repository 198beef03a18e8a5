"""Hidden buffers that a simulated chip's kernels keep, one for every new shape."""

from collections.abc import Callable

from backends.simulator.memory import Region

Shapes = tuple[tuple[int, ...], ...]


class Workspaces:
    """Memory of one chip that no allocation of its user accounts for."""

    def __init__(self) -> None:
        self._regions: dict[tuple[str, Shapes], Region] = {}

    def keep(self, operation: str, shapes: Shapes, allocate: Callable[[], Region]) -> None:
        """Takes a buffer if the operation meets these shapes for the first time."""
        if (operation, shapes) not in self._regions:
            self._regions[operation, shapes] = allocate()

    def take_out(self, operation: str | None = None) -> list[Region]:
        """Forgets the buffers of an operation, or all, and hands them out to be freed."""
        chosen = [key for key in self._regions if operation in (None, key[0])]
        return [self._regions.pop(key) for key in chosen]

    def bytes_by_operation(self) -> dict[str, int]:
        """What each operation keeps."""
        kept: dict[str, int] = {}
        for (operation, _), region in self._regions.items():
            kept[operation] = kept.get(operation, 0) + region.size
        return kept

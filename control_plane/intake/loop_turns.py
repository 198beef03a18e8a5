"""Work that takes long leaves the event loop a turn now and then."""

import anyio.lowlevel


class LoopTurns:
    """amount_max: so much may be done before others get a turn, in whatever the caller counts."""

    def __init__(self, amount_max: int) -> None:
        self._amount_max = amount_max
        self._amount = 0

    async def did(self, amount: int) -> None:
        """Counts what was done; gives a turn if it is enough together with what was before."""
        self._amount += amount
        if self._amount >= self._amount_max:
            self._amount = 0
            await anyio.lowlevel.checkpoint()

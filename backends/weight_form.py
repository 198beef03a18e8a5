"""How the numbers of a weight are held on a chip: as they are, or in one of GGUF's block types."""

from enum import Enum

_BLOCK_COLUMNS = 32
_BLOCK_BYTES = {"Q8_0": 2 + 32, "Q4_0": 2 + 16, "Q4_1": 4 + 16}


class WeightForm(Enum):
    """A form by the name that GGUF has for it. Of a block of columns the numbers share a scale.

    Q8_0: 8 bits times a float16. Q4_0: 4 bits, -8 to 7, times a float16. Q4_1: 4 bits, 0 to 15,
    times a float16 plus another.
    """

    PLAIN = "plain"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"

    @property
    def block_columns(self) -> int:
        """Columns of a row that are one block; 1 where there are none."""
        return 1 if self is WeightForm.PLAIN else _BLOCK_COLUMNS

    @property
    def block_bytes(self) -> int:
        """What a block takes in a file; plain numbers take what their dtype does."""
        assert self is not WeightForm.PLAIN, "plain weights are in no blocks"
        return _BLOCK_BYTES[self.value]

    def row_bytes(self, columns: int) -> int:
        """What a row of whole blocks takes."""
        assert columns % self.block_columns == 0, f"{columns} columns are no whole blocks"
        return columns // self.block_columns * self.block_bytes

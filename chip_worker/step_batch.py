"""The tokens of a step, gathered from its rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.interface import BatchRows
from chip_worker.slots import PlannedRow


@dataclass(frozen=True)
class StepBatch:
    """The tokens of a step, all rows one after the other.

    ids, positions: [T] int64 on the host. rows: of every KV group. sampled_tokens: places in T of
    the last token of every sampled row, ascending.
    """

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    rows: tuple[BatchRows, ...]
    sampled_tokens: tuple[int, ...]


def build_batch(rows: Sequence[PlannedRow]) -> StepBatch:
    """Gathers ids, positions and block tables of planned rows; `rows` is not empty."""
    query_starts = [0]
    sampled_tokens: list[int] = []
    for row in rows:
        query_starts.append(query_starts[-1] + row.stop - row.start)
        if row.sampled:
            sampled_tokens.append(query_starts[-1] - 1)
    return StepBatch(
        ids=np.concatenate([row.slot.tokens[row.start : row.stop] for row in rows]),
        positions=np.concatenate([np.arange(row.start, row.stop) for row in rows]),
        rows=_group_rows(rows, tuple(query_starts)),
        sampled_tokens=tuple(sampled_tokens),
    )


def _group_rows(rows: Sequence[PlannedRow], query_starts: tuple[int, ...]) -> tuple[BatchRows, ...]:
    """The same tokens in the block tables of one KV group after the other."""
    context_starts = tuple(row.start for row in rows)
    return tuple(
        BatchRows(
            query_starts,
            context_starts,
            block_tables=tuple(table.block_ids for table in tables),
            table_starts=tuple(table.start for table in tables),
        )
        for tables in zip(*(row.slot.tables for row in rows), strict=True)
    )

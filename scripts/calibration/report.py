"""A calibration as tables for people and as JSON."""

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from scripts.calibration.calibration_file import Point
from scripts.calibration.measurement import Measurement
from scripts.calibration.recommendation import SHARE, Rate
from scripts.titled_table import titled_table
from scripts.workloads.machine import measured_here

MS = 1e3
US = 1e6


def chunk_table(measured: Measurement) -> Table:
    """A row for every size of chunks."""
    title = f"Prefill in a prompt of {measured.sweep.prompt_tokens} tokens"
    chosen = measured.calibration.settings.chunk_tokens
    return _table(title, "Chunk", measured.sweep.chunks, measured.chunk_rates, chosen)


def batch_table(measured: Measurement) -> Table:
    """A row for every number of rows that decode."""
    title = f"Decode behind {measured.sweep.position} tokens"
    chosen = measured.calibration.settings.running_max
    return _table(title, "Rows", measured.sweep.batches, measured.batch_rates, chosen)


def summary(measured: Measurement) -> list[str]:
    """What it comes to, a line each."""
    calibration = measured.calibration
    cost = calibration.step_time
    errors = [abs(cost.predict(each.work) / each.seconds - 1) for each in calibration.points]
    return [
        f"Recommended: --chunk-tokens {calibration.settings.chunk_tokens} --max-running "
        f"{calibration.settings.running_max}, the least with {SHARE:.0%} of the best throughput.",
        f"Cost model, within {median(errors):.0%} of half of the steps: {cost.step_s * MS:.2f} ms "
        f"+ {cost.chunk_token_s * US:.1f} µs a token of a chunk "
        f"+ {cost.chunk_context_s * US:.4f} µs a token it attends to "
        f"+ {cost.decode_row_s * US:.1f} µs a row that decodes "
        f"+ {cost.decode_context_s * US:.4f} µs a token it attends to.",
    ]


def document(measured: Measurement) -> dict[str, object]:
    """Everything as JSON has it; nothing is rounded."""
    sweep = measured.sweep
    return {
        **measured_here(measured.calibration.measured_at),
        "calibration": measured.calibration.content(),
        "prompt_tokens": sweep.prompt_tokens,
        "position": sweep.position,
        "rows_held": sweep.rows_held,
        "chunks": _objects(measured.chunk_rates, sweep.chunks, "chunk_tokens"),
        "batches": _objects(measured.batch_rates, sweep.batches, "rows"),
        "remarks": list(measured.remarks),
    }


def _table(
    title: str, size: str, points: Sequence[Point], rates: Sequence[Rate], chosen: int
) -> Table:
    table = titled_table(title, (), (size, "Step ms", "Tokens/s", "Of the best"))
    table.add_column("")
    best = max(rate.tokens_per_s for rate in rates)
    for point, rate in zip(points, rates, strict=True):
        table.add_row(
            f"{rate.size}",
            f"{point.seconds * MS:.2f}",
            f"{rate.tokens_per_s:.1f}",
            f"{rate.tokens_per_s / best:.0%}",
            "recommended" if rate.size == chosen else "",
        )
    return table


def _objects(rates: Sequence[Rate], points: Sequence[Point], size: str) -> list[dict[str, float]]:
    return [
        {size: rate.size, "step_ms": point.seconds * MS, "tokens_per_s": rate.tokens_per_s}
        for rate, point in zip(rates, points, strict=True)
    ]

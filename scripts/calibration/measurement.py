"""A calibration from first to last: the group is formed, swept, and what was found put together."""

from dataclasses import dataclass
from datetime import datetime

from scripts.calibration.calibration_file import Calibration, Point
from scripts.calibration.measured_group import open_group
from scripts.calibration.recommendation import Rate, Recommendation, recommend
from scripts.calibration.step_time_fit import fit_step_time
from scripts.calibration.sweep import Extent, Sweep, Sweeper, Watcher
from scripts.settings import ServeSettings


@dataclass(frozen=True)
class Measurement:
    """What was measured, and what came of it. rates: of chunks, and of rows that decode."""

    sweep: Sweep
    chunk_rates: tuple[Rate, ...]
    batch_rates: tuple[Rate, ...]
    recommendation: Recommendation
    calibration: Calibration

    @property
    def remarks(self) -> tuple[str, ...]:
        """On what was left out, and on what limits the recommendation."""
        return self.sweep.remarks + self.recommendation.remarks


async def measure(
    settings: ServeSettings, extent: Extent, watcher: Watcher, now: datetime
) -> Measurement:
    """Measures the first group of a service of these settings. Raises CalibrationFailed."""
    async with open_group(settings, extent.slots, extent.chunks[-1]) as group:
        deadline_s = settings.control_plane.scheduling.step_deadline_s
        sweep = await Sweeper(group, extent, deadline_s, watcher).measure()
    chunk_rates = tuple(_rate(point, point.work.chunk_tokens) for point in sweep.chunks)
    batch_rates = tuple(_rate(point, point.work.decode_rows) for point in sweep.batches)
    recommendation = recommend(chunk_rates, batch_rates, sweep.rows_held, sweep.limited)
    calibration = Calibration(
        model=settings.control_plane.model_path,
        model_digest=group.worker.model_digest,
        backend=settings.backend_of_group[0],
        group_size=settings.group_sizes[0],
        dtype=group.worker.dtype,
        weights=settings.weights,
        device=group.worker.device,
        measured_at=now.isoformat(timespec="seconds"),
        settings=recommendation.settings,
        step_time=fit_step_time(sweep.points),
        block_tokens=group.block_tokens,
        kv_blocks=group.blocks,
        points=sweep.points,
    )
    return Measurement(sweep, chunk_rates, batch_rates, recommendation, calibration)


def _rate(point: Point, size: int) -> Rate:
    return Rate(size, size / point.seconds)

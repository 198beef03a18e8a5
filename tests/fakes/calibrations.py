"""A calibration with made-up figures."""

from control_plane.scheduling.step_time import StepWork
from scripts.calibration.calibration_file import (
    CalibratedSettings,
    Calibration,
    Point,
    StepTime,
)

CALIBRATION = Calibration(
    model="model.gguf",
    model_digest="5f1c",
    backend="cpu",
    group_size=2,
    dtype="bfloat16",
    weights="auto",
    device="CPU, 2 cores",
    measured_at="2026-11-30T13:10:00+00:00",
    settings=CalibratedSettings(chunk_tokens=512, running_max=16),
    step_time=StepTime(0.004, 4e-4, 1e-7, 5e-4, 1e-6),
    block_tokens=16,
    kv_blocks=2048,
    points=(
        Point(StepWork(64, 2080, 0, 0), 0.03),
        Point(StepWork(0, 0, 4, 400), 0.0064),
    ),
)

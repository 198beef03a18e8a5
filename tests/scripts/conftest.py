"""Which tests of the commands can run."""

import importlib.util

# They make checkpoints or open chips; the run on Python 3.10 has no torch.
collect_ignore = (
    []
    if importlib.util.find_spec("torch")
    else [
        "test_bench_step.py",
        "test_calibrate.py",
        "test_plan_against_workers.py",
        "test_settings_file.py",
    ]
)

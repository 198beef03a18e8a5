"""Opens the chip twice and lets both take turns; importing this imports torch.

A captured step has no calls to time, so a second session computes the same operation by operation.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace

from backends.debug import DebugLog, DebugRuntime
from backends.interface import BackendRuntime
from backends.plugin import Backend, BackendConfig
from chip_worker.config import WorkerConfig
from scripts.step_cost.costs import Calls, Costs, Extent, measure_load
from scripts.step_cost.step_chip import StepChip

TIMED_CALLS = "kernels.*,collectives.*"


def measure(
    extent: Extent,
    config: WorkerConfig,
    backend: Backend,
    backend_config: BackendConfig,
    read_per_s: float | None,
    on_next: Callable[[str], None],
) -> Costs:
    """Everything `extent` names. on_next: told what is measured next.

    Raises StepFailed, BackendError or ModelError.
    """
    calls = Calls()
    log = DebugLog(calls.take, TIMED_CALLS)

    def timed(runtime: BackendRuntime) -> BackendRuntime:
        return DebugRuntime(runtime, log)

    with ExitStack() as stack:
        on_next("loading the model")
        chip = stack.enter_context(closing(StepChip(config, backend, backend_config, extent)))
        called = replace(config, captured_tokens=0)
        timed_chip = stack.enter_context(
            closing(StepChip(called, backend, backend_config, extent, timed))
        )
        steps = []
        for load in extent.loads:
            on_next(load.text)
            steps.append(measure_load(load, extent.repeats, chip, timed_chip, calls))
        return Costs(extent, chip.facts, steps, chip.weight_bytes, read_per_s)

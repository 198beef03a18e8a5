"""Configuration of a chip worker: every limit, with its default and unit, checked together."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from chip_worker.errors import ConfigurationError

MIB = 1 << 20
ACQUIRE_DEADLINE_S = 60.0
CAPTURED_TOKENS = 256
"""Beyond that a step's operations take long beside the calls that ask for them."""
CAPTURED_TOKENS_MAX = 256
"""Every number of tokens has a program, and keeps its own hidden states."""
WEIGHTS = ("auto", "bf16", "int8", "native")
"""How weights may be held: see docs/kernels.md."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Configuration of the process; sizes in bytes, times in seconds.

    control_plane: HOST:PORT, or HOST:@FILE, see `plane_address`. model_path: a GGUF file or a
    Hugging Face directory. chip_indices: chips this process may use, of which it serves the first
    that opens. devices: ids of the chips of the service, in which the indices are positions; empty:
    all there are. dtype: a name such as "float32", or "auto". weights: one of WEIGHTS. Intervals of
    heartbeats come from the control plane's Welcome.
    """

    worker_id: str
    control_plane: str
    model_path: str
    backend: str = "cpu"
    chip_indices: tuple[int, ...] = (0,)
    devices: tuple[str, ...] = ()
    chips_on_host: int = 1
    dtype: str = "auto"
    weights: str = "auto"
    backend_options: Mapping[str, str] = field(default_factory=dict)
    kv_blocks: int | None = None
    """Blocks of the KV pool; None takes what the slots can need, within `kv_memory_fraction`."""
    kv_memory_fraction: float = 0.25
    """Share of the host's or chip's free memory that all chips on it may take for KV."""
    kv_memory_reserve: float = 0.2
    """Part of that share that is left free, for what measurements do not see."""
    acquire_deadline_s: float = ACQUIRE_DEADLINE_S
    """For opening and probing the chip; beyond it the process tells so and ends."""
    debug_backend: str | None = None
    """Globs of the backend primitives that are logged, such as "kernels.*"; None logs none."""
    debug_backend_calls: int = 256
    """Primitive calls that are kept for the log of a fault, if any are logged."""
    status_file: str | None = None
    message_bytes_max: int = 64 * MIB
    connect_backoff_first_s: float = 0.1
    connect_backoff_max_s: float = 5.0
    join_token: str | None = None
    captured_tokens: int = CAPTURED_TOKENS
    """Steps of at most so many tokens are captured on chips that can, and replayed; 0: none."""
    step_credit: int = 2
    """Steps the control plane may send before a result returns."""

    def __post_init__(self) -> None:
        """Raises ConfigurationError naming the setting, its value and its limits."""
        if not self.worker_id:
            raise ConfigurationError("worker_id is empty; give the worker a stable name")
        if not self.chip_indices:
            raise ConfigurationError("chip_indices is empty; name at least one chip")
        for name in ("chips_on_host", "message_bytes_max", "step_credit", "debug_backend_calls"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.captured_tokens <= CAPTURED_TOKENS_MAX:
            raise ConfigurationError(
                f"captured_tokens is {self.captured_tokens}; "
                f"it must be in [0, {CAPTURED_TOKENS_MAX}]"
            )
        if self.weights not in WEIGHTS:
            raise ConfigurationError(f"weights is {self.weights!r}; choose {', '.join(WEIGHTS)}")
        if not self.acquire_deadline_s > 0.0:
            raise ConfigurationError(
                f"acquire_deadline_s is {self.acquire_deadline_s}; it must be above 0"
            )
        beyond = [index for index in self.chip_indices if index >= len(self.devices)]
        if self.devices and beyond:
            raise ConfigurationError(
                f"chip {beyond[0]} is beyond the {len(self.devices)} devices of --devices; "
                f"chips are counted from 0 in that list"
            )
        if self.kv_blocks is not None and self.kv_blocks < 1:
            raise ConfigurationError(f"kv_blocks is {self.kv_blocks}; it must be at least 1")
        if not 0.0 < self.kv_memory_fraction <= 1.0:
            raise ConfigurationError(
                f"kv_memory_fraction is {self.kv_memory_fraction}; it must be in (0, 1]"
            )
        if not 0.0 <= self.kv_memory_reserve < 1.0:
            raise ConfigurationError(
                f"kv_memory_reserve is {self.kv_memory_reserve}; it must be in [0, 1)"
            )
        if not 0.0 < self.connect_backoff_first_s <= self.connect_backoff_max_s:
            raise ConfigurationError(
                f"connect backoff starts at {self.connect_backoff_first_s} s and ends at "
                f"{self.connect_backoff_max_s} s; it must start above 0 and not above its end"
            )

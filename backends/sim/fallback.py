"""Operations that the vendor's library lacks: the reference's formulas, as plain torch on the chip.

Correct but slow. Queued like any kernel, so that what they read is there and what they write comes
late; a formula takes any view and any dtype.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from backends.sim.launcher import size_bytes
from backends.sim.open_devices import OpenDevices
from kernels.paged_kv import PagedKV

Reference = Callable[..., Any]
"""(operation, *arguments): the reference's answer."""


class SimFallback:
    """Each public method is the operation of its name in `kernels.spec`."""

    def __init__(self, devices: OpenDevices, reference: Reference) -> None:
        self._devices = devices
        self._reference = reference

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Half as wide."""
        device = self._devices.holding(gate_up)
        output = device.allocate((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        run = partial(self._fill, output, "gelu_mul", gate_up)
        device.driver.launch_formula("gelu_mul", run, (gate_up,), (output,), size_bytes(gate_up))
        return output

    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """As large."""
        device = self._devices.holding(logits)
        output = device.allocate(logits.shape, logits.dtype)
        run = partial(self._fill, output, "soft_cap", logits, cap)
        device.driver.launch_formula("soft_cap", run, (logits,), (output,), size_bytes(logits))
        return output

    def attention(
        self,
        cache: PagedKV,
        layer: int,
        query: torch.Tensor,
        q_to_kv: tuple[int, ...],
        scale: float,
        window: int,
        soft_cap: float,
    ) -> torch.Tensor:
        """Row by row, the heads as they are."""
        keys, values = cache.keys[layer], cache.values[layer]
        device = self._devices.holding(keys)
        output = device.allocate(query.shape, query.dtype)
        rest = (q_to_kv, scale, window, soft_cap)
        behind = (min(count, window - 1) if window else count for count in cache.context_starts)
        seen = query.shape[0] + sum(behind)
        device.driver.launch_formula(
            "attention",
            partial(self._fill, output, "attention", cache, layer, query, *rest),
            (query, keys, values, cache.block_tables),
            (output,),
            2 * size_bytes(query) + 2 * seen * size_bytes(keys[0, 0]),
        )
        return output

    def _fill(self, output: torch.Tensor, operation: str, *arguments: object) -> None:
        output.copy_(self._reference(operation, *arguments))

"""The operations over the vendor's library: adapters that make right what its kernels refuse.

    operation  --adapter-->  contiguous, int32 where asked, padded, in pieces  --driver-->  launches

Results are allocated on the chip and written late: in the order of the chip's work, at the latest
when the host waits for it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from backends.sim.attention import SimAttention
from backends.sim.fallback import Reference, SimFallback
from backends.sim.launcher import pieces
from backends.sim.open_devices import OpenDevices
from backends.sim.sampling import SimSampling
from backends.simulator.profile import Profile
from kernels.paged_kv import PAGED_ORDER
from kernels.spec import SOFT_CAP, WINDOW, Implementation, Support


class SimKernels:
    """Each method is the operation of its name in `kernels.spec`."""

    def __init__(self, devices: OpenDevices) -> None:
        self._devices = devices

    def embedding(
        self, ids: torch.Tensor, weight: torch.Tensor, first_row: int, scale: float
    ) -> torch.Tensor:
        """Indices go in as the kernel wants them."""
        device = self._devices.holding(weight)
        output = device.allocate((ids.shape[0], weight.shape[1]), weight.dtype)
        ids, weight = device.indices(ids), device.contiguous(weight)
        device.driver.embedding(ids, weight, first_row, output)
        if scale != 1.0:
            device.driver.multiply(output, scale)
        return output

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """The norm of each row; the kernel takes rows only, not heads of rows."""
        device = self._devices.holding(weight)
        output = device.allocate(x.shape, x.dtype)
        if x.ndim == 2:
            device.driver.rmsnorm(device.contiguous(x), weight, output, epsilon)
        else:
            rows = (-1, x.shape[-1])
            flat = device.without_gaps(x).view(rows)
            device.driver.rmsnorm(flat, weight, output.view(rows), epsilon)
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of a sum, and the sum in float32."""
        device = self._devices.holding(weight)
        output = device.allocate(x.shape, x.dtype)
        total = device.allocate(x.shape, torch.float32)
        x, residual = device.contiguous(x), device.contiguous(residual)
        device.driver.add_rmsnorm(x, residual, weight, output, epsilon, residual_output=total)
        return output, total

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        context: object | None,
    ) -> torch.Tensor:
        """x times the transposed weight, plus the bias."""
        assert context is None, "row-to-adapter maps are not defined yet"
        return self._product("linear", x, weight, bias, x.dtype)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The product, never rounded below float32."""
        return self._product("logits", hidden, weight, None, torch.float32)

    def _product(
        self,
        name: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        device = self._devices.holding(weight)
        output = device.allocate((x.shape[0], weight.shape[0]), dtype)
        device.driver.matmul(name, device.contiguous(x), device.contiguous(weight), bias, output)
        return output

    def rotary(
        self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """The vendor's kernel works in place: it gets a copy, which is the result."""
        device = self._devices.holding(cos_sin)
        output = device.allocate(x.shape, x.dtype)
        device.copy(x, output)
        device.driver.rotary_embedding(device.indices(positions), output, cos_sin)
        return output

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Halves padded to whole words, rows in pieces that the kernel gets right."""
        device = self._devices.holding(gate_up)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        padded = device.driver.whole_words(width, gate_up.dtype)
        if padded != width:
            return self._padded_silu_mul(gate_up, width, padded)
        gate_up = device.contiguous(gate_up)
        output = device.allocate((rows, width), gate_up.dtype)
        for piece in pieces(rows, device.driver.exact_rows_max):
            device.driver.swiglu(gate_up[piece], output[piece])
        return output

    def _padded_silu_mul(self, gate_up: torch.Tensor, width: int, padded: int) -> torch.Tensor:
        device = self._devices.holding(gate_up)
        rows = gate_up.shape[0]
        halves = device.allocate((rows, 2, padded), gate_up.dtype)
        device.driver.fill(halves, 0.0)
        for half in range(2):
            device.copy(gate_up[:, half * width : (half + 1) * width], halves[:, half, :width])
        output = device.allocate((rows, width), gate_up.dtype)
        device.copy(self.silu_mul(halves.view(rows, 2 * padded))[:, :width], output)
        return output

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Gelu of the first half, times the second."""
        device = self._devices.holding(gate_up)
        output = device.allocate((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
        device.driver.gelu_tanh_and_mul(device.contiguous(gate_up), output)
        return output

    def implementations(self, profile: Profile, reference: Reference) -> tuple[Implementation, ...]:
        """All operations, for a kernel table: the library's, and behind them what it lacks."""
        fallback, paged = SimFallback(self._devices, reference), Support(layouts=(PAGED_ORDER,))
        every_feature = replace(paged, features=(WINDOW, SOFT_CAP))
        return (
            *self._library(profile),
            Implementation("gelu_mul", "sim-formula", fallback.gelu_mul, rank=1),
            Implementation("soft_cap", "sim-formula", fallback.soft_cap, rank=1),
            Implementation("attention", "sim-formula", fallback.attention, every_feature, rank=1),
        )

    def _library(self, profile: Profile) -> Iterator[Implementation]:
        """What the vendor's library has on this kind of chip."""
        attention, sampling = SimAttention(self._devices), SimSampling(self._devices)
        anything, paged = Support(), Support(layouts=(PAGED_ORDER,))
        asked = {
            WINDOW: profile.attention_window.value,
            SOFT_CAP: profile.attention_soft_cap.value,
        }
        features = tuple(feature for feature, there in asked.items() if there)
        functions: dict[str, tuple[Callable[..., Any], Support]] = {
            "embedding": (self.embedding, anything),
            "rms_norm": (self.rms_norm, anything),
            "add_rms_norm": (self.add_rms_norm, anything),
            "linear": (self.linear, anything),
            "logits": (self.logits, anything),
            "rotary": (self.rotary, anything),
            "silu_mul": (self.silu_mul, anything),
            "write_kv": (attention.write_kv, paged),
            "attention": (attention.attention, replace(paged, features=features)),
            "adjust_logits": (sampling.adjust_logits, anything),
            "sample": (sampling.sample, anything),
            "token_logprobs": (sampling.token_logprobs, anything),
        }
        if profile.gelu_gate.value:
            functions["gelu_mul"] = (self.gelu_mul, anything)
        for operation, (function, support) in functions.items():
            yield Implementation(operation, "sim-driver", function, support)

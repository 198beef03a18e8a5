"""Operations of the native kernels: tensors become addresses, results are new tensors.

Each agrees with the reference it replaces; see kernels/cpu.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref
from typing import Any

import numpy as np
import torch

from backends.cpu.kernel_library import (
    HEAD_SIZE_MAX,
    NUMBERS,
    AddRmsNorm,
    AttentionLayer,
    AttentionStep,
    Engine,
    GatedActivation,
    PackedMatrix,
    Product,
    RmsNorm,
    Rotary,
    Rows,
    WriteKV,
)
from kernels.paged_kv import PAGED_ORDER, PagedKV
from kernels.spec import SOFT_CAP, WINDOW, Implementation, Support

_QUERIES_MAX = 8
"""Of a row: above it torch's products of matrices win."""

_SILU, _GELU = 0, 1
"""Activation in kernels/cpu/rows.h."""

Attention = Callable[[PagedKV, int, torch.Tensor, tuple[int, ...], float, int, float], torch.Tensor]


class NativeKernels:
    """The operations on one engine.

    other_attention: computes what the native one cannot, or not as fast: large heads, and chunks
    of prompts, whose scores are products of matrices.
    """

    def __init__(self, engine: Engine, other_attention: Attention) -> None:
        self._library = engine.library
        self._owner = engine
        self._engine = engine.address
        self._other_attention = other_attention
        self._name = f"native, {engine.instructions}"

    def implementations(self) -> Sequence[Implementation]:
        """All of them."""
        numbers = Support(dtypes=("float32", "bfloat16"))
        cached = Support(numbers.dtypes, layouts=(PAGED_ORDER,))
        attention = Support(numbers.dtypes, layouts=(PAGED_ORDER,), features=(WINDOW, SOFT_CAP))
        return [
            Implementation(operation, self._name, function, support)
            for operation, function, support in (
                ("linear", self.linear, numbers),
                ("logits", self.logits, numbers),
                ("rms_norm", self.rms_norm, numbers),
                ("add_rms_norm", self.add_rms_norm, numbers),
                ("rotary", self.rotary, numbers),
                ("silu_mul", self.silu_mul, numbers),
                ("gelu_mul", self.gelu_mul, numbers),
                ("write_kv", self.write_kv, cached),
                ("attention", self.attention, attention),
            )
        ]

    def linear(
        self,
        x: torch.Tensor,
        weight: PackedMatrix,
        bias: torch.Tensor | None,
        context: object | None,
    ) -> torch.Tensor:
        """Sums are float32, rounded once with the bias."""
        assert context is None, "row-to-adapter maps are not defined yet"
        return self._product(x, weight, bias, x.dtype)

    def logits(self, hidden: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
        """The sums as they are."""
        return self._product(hidden, weight, None, torch.float32)

    def _product(
        self,
        x: torch.Tensor,
        weight: PackedMatrix,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        assert weight.engine is self._owner, "the weight is packed for another chip"
        assert x.dtype == weight.dtype, f"{x.dtype} with a weight of {weight.dtype}"
        assert x.shape[1] == weight.shape[1], f"{tuple(x.shape)} with {tuple(weight.shape)}"
        if bias is not None:
            assert bias.dtype == x.dtype, f"{x.dtype} with a bias of {bias.dtype}"
            bias = bias.contiguous()
        x = _rows_of_numbers(x)
        rows, outputs = x.shape[0], weight.shape[0]
        output = torch.empty((rows, outputs), dtype=dtype)
        call = Product(
            weight.address,
            x.data_ptr(),
            x.stride(0),
            rows,
            None if bias is None else bias.data_ptr(),
            output.data_ptr(),
            outputs,
            NUMBERS[dtype],
        )
        self._library.polychip_linear(self._engine, byref(call))
        return output

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Any leading dimensions."""
        shape, size = x.shape, x.shape[-1]
        assert weight.dtype == x.dtype, f"{x.dtype} with a weight of {weight.dtype}"
        x = _rows_of_numbers(x if x.dim() in (2, 3) else x.reshape(-1, size))
        outer, inner = x.shape[0], x.shape[1] if x.dim() == 3 else 1
        output = torch.empty(x.shape, dtype=x.dtype)
        call = RmsNorm(
            NUMBERS[x.dtype],
            outer,
            inner,
            size,
            _rows(x),
            weight.data_ptr(),
            epsilon,
            _rows(output),
        )
        self._library.polychip_rms_norm(self._engine, byref(call))
        return output.view(shape)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In one pass over each row."""
        assert weight.dtype == x.dtype, f"{x.dtype} with a weight of {weight.dtype}"
        x, residual = _rows_of_numbers(x), _rows_of_numbers(residual)
        outer, size = x.shape
        output = torch.empty(x.shape, dtype=x.dtype)
        total = torch.empty(x.shape, dtype=torch.float32)
        call = AddRmsNorm(
            NUMBERS[x.dtype],
            outer,
            size,
            _rows(x),
            _rows(residual),
            NUMBERS[residual.dtype],
            weight.data_ptr(),
            epsilon,
            _rows(output),
            _rows(total),
        )
        self._library.polychip_add_rms_norm(self._engine, byref(call))
        return output, total

    def rotary(
        self, x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        """Products and sums in float32, rounded once."""
        x, positions, cos_sin = _rows_of_numbers(x), positions.contiguous(), cos_sin.contiguous()
        assert positions.dtype == torch.int64, positions.dtype
        assert cos_sin.dtype == torch.float32, cos_sin.dtype
        outer, inner, size = x.shape
        output = torch.empty(x.shape, dtype=x.dtype)
        call = Rotary(
            NUMBERS[x.dtype],
            outer,
            inner,
            size,
            _rows(x),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            _rows(output),
        )
        self._library.polychip_rotary(self._engine, byref(call))
        return output

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """In one pass."""
        return self._activate(gate_up, _SILU)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """In one pass."""
        return self._activate(gate_up, _GELU)

    def _activate(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        gate_up = _rows_of_numbers(gate_up)
        outer, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((outer, size), dtype=gate_up.dtype)
        call = GatedActivation(
            NUMBERS[gate_up.dtype], activation, outer, size, _rows(gate_up), _rows(output)
        )
        self._library.polychip_gated_activation(self._engine, byref(call))
        return output

    def write_kv(self, cache: PagedKV, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Copies each token's heads into its block."""
        key, value = _rows_of_numbers(key), _rows_of_numbers(value)
        cached = cache.keys[layer]
        assert key.shape == value.shape == (len(cache.token_blocks), *cached.shape[2:]), key.shape
        assert key.dtype == value.dtype == cached.dtype, f"{key.dtype} into {cached.dtype}"
        call = WriteKV(
            NUMBERS[key.dtype],
            *key.shape,
            _rows(key),
            _rows(value),
            cached.data_ptr(),
            cache.values[layer].data_ptr(),
            cached.stride(0) * cached.element_size(),
            *cached.shape[:2],
            cache.token_blocks.data_ptr(),
            cache.token_places.data_ptr(),
        )
        if not self._library.polychip_write_kv(self._engine, byref(call)):
            raise IndexError(f"a token's place is not in the {cached.shape[0]} blocks")

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
        """Straight from the blocks; what depends on the step only is planned in its first layer."""
        key = ("native", q_to_kv, query.dtype, scale, window, soft_cap)
        if key not in cache.step_cache:
            cache.step_cache[key] = self._plan(cache, query, q_to_kv, scale, window, soft_cap)
        plan = cache.step_cache[key]
        if plan is None:
            return self._other_attention(cache, layer, query, q_to_kv, scale, window, soft_cap)
        query = _rows_of_numbers(query)
        output = torch.empty(query.shape, dtype=query.dtype)
        call = AttentionLayer(
            cache.keys[layer].data_ptr(),
            cache.values[layer].data_ptr(),
            _rows(query),
            _rows(output),
        )
        self._library.polychip_attention(self._engine, plan.address, byref(call))
        return output

    def _plan(
        self,
        cache: PagedKV,
        query: torch.Tensor,
        q_to_kv: tuple[int, ...],
        scale: float,
        window: int,
        soft_cap: float,
    ) -> "_AttentionPlan | None":
        """None if the other attention is to compute the step."""
        queries = max((b - a for a, b in itertools.pairwise(cache.query_starts)), default=0)
        if query.shape[-1] > HEAD_SIZE_MAX or queries > _QUERIES_MAX:
            return None
        cached, tables = cache.keys[0], cache.block_tables.contiguous()
        assert query.dtype == cached.dtype, f"{query.dtype} with keys of {cached.dtype}"
        assert 0 <= min(q_to_kv) <= max(q_to_kv) < cached.shape[2], q_to_kv
        starts, contexts, table_starts, heads = (
            np.array(numbers, dtype=np.int64)
            for numbers in (cache.query_starts, cache.context_starts, cache.table_starts, q_to_kv)
        )
        step = AttentionStep(
            NUMBERS[query.dtype],
            len(contexts),
            starts.ctypes.data,
            contexts.ctypes.data,
            table_starts.ctypes.data,
            tables.data_ptr(),
            tables.shape[1],
            cached.shape[0],
            cache.block_tokens,
            cached.stride(0) * cached.element_size(),
            query.shape[1],
            cached.shape[2],
            query.shape[2],
            heads.ctypes.data,
            scale,
            window,
            soft_cap,
        )
        address = self._library.polychip_attention_plan(self._engine, byref(step))
        if not address:
            raise IndexError(f"a block table names a block that is not of the {cached.shape[0]}")
        return _AttentionPlan(
            address,
            self._library.polychip_attention_plan_free,
            (starts, contexts, table_starts, tables, heads),
        )


class _AttentionPlan:
    """A native plan, and what it points to."""

    def __init__(self, address: int, free: Callable[[int], None], kept: tuple[Any, ...]) -> None:
        self.address = address
        self._kept = kept
        weakref.finalize(self, free, address).atexit = False


def _rows_of_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a row side by side, as the kernels read them; rows may lie anywhere."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def _rows(tensor: torch.Tensor) -> Rows:
    """[outer, size] or [outer, inner, size]."""
    strides = tensor.stride()
    return Rows(tensor.data_ptr(), strides[0], strides[1] if len(strides) == 3 else 0)

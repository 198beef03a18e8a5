"""Operations of the native kernels: tensors become addresses, results are new tensors.

Each agrees with the reference it replaces; see kernels/cpu.
"""

import weakref
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from backends.cpu.kernel_library import (
    HEAD_SIZE_MAX,
    NUMBERS,
    AddRmsNorm,
    AttentionLayer,
    AttentionStep,
    Engine,
    GatedActivation,
    Lookup,
    PackedMatrix,
    Product,
    RmsNorm,
    Rotary,
    Rows,
    WriteKV,
)
from backends.errors import UnsupportedOperation
from kernels.paged_kv import PAGED_ORDER, PagedKV, StepPlan
from kernels.spec import SOFT_CAP, WINDOW, Implementation, Support

_SILU, _GELU = 0, 1
"""Activation in kernels/cpu/rows.h."""

Attention = Callable[[PagedKV, int, torch.Tensor, tuple[int, ...], float, int, float], torch.Tensor]


class NativeKernels:
    """The operations on one engine.

    other_attention: computes what the native one cannot: heads above HEAD_SIZE_MAX.
    """

    def __init__(self, engine: Engine, other_attention: Attention) -> None:
        self._library = engine.library
        self._owner = engine
        self._engine = engine.address
        self._empty = engine.output
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
                ("embedding", self.embedding, numbers),
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

    def embedding(
        self, ids: torch.Tensor, weight: PackedMatrix | torch.Tensor, first_row: int, scale: float
    ) -> torch.Tensor:
        """Of a packed weight or of rows in memory; an id that is in neither gives zeros."""
        assert ids.dtype == torch.int64, ids.dtype
        ids = self._contiguous(ids)
        address, table = None, Rows(None, 0, 0)
        if isinstance(weight, PackedMatrix):
            address = weight.address
        else:
            weight = self._side_by_side(weight)
            table = _rows(weight)
        output = self._empty((len(ids), weight.shape[1]), weight.dtype)
        call = Lookup(
            NUMBERS[weight.dtype],
            *output.shape,
            ids.data_ptr(),
            first_row,
            address,
            table,
            weight.shape[0],
            scale,
            _rows(output),
        )
        self._library.polychip_lookup(self._engine, byref(call))
        return output

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
            bias = self._contiguous(bias)
        x = self._side_by_side(x)
        rows, outputs = x.shape[0], weight.shape[0]
        output = self._empty((rows, outputs), dtype)
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
        x = self._side_by_side(x) if x.dim() in (2, 3) else self._contiguous(x).view(-1, size)
        outer, inner = x.shape[0], x.shape[1] if x.dim() == 3 else 1
        output = self._empty(x.shape, x.dtype)
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
        x, residual = self._side_by_side(x), self._side_by_side(residual)
        outer, size = x.shape
        output = self._empty(x.shape, x.dtype)
        total = self._empty(x.shape, torch.float32)
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
        x = self._side_by_side(x)
        positions, cos_sin = self._contiguous(positions), self._contiguous(cos_sin)
        assert positions.dtype == torch.int64, positions.dtype
        assert cos_sin.dtype == torch.float32, cos_sin.dtype
        outer, inner, size = x.shape
        output = self._empty(x.shape, x.dtype)
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
        gate_up = self._side_by_side(gate_up)
        outer, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = self._empty((outer, size), gate_up.dtype)
        call = GatedActivation(
            NUMBERS[gate_up.dtype], activation, outer, size, _rows(gate_up), _rows(output)
        )
        self._library.polychip_gated_activation(self._engine, byref(call))
        return output

    def write_kv(self, cache: PagedKV, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Copies each token's heads into its block."""
        key, value = self._side_by_side(key), self._side_by_side(value)
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
            planned = None
            if self._attends(query):
                scores = _Scores(q_to_kv, scale, window, soft_cap)
                planned = _AttentionPlan(self._owner, cache, query, scores)
            cache.step_cache[key] = planned
        plan = cache.step_cache[key]
        if plan is None:
            return self._other_attention(cache, layer, query, q_to_kv, scale, window, soft_cap)
        query = self._side_by_side(query)
        output = self._empty(query.shape, query.dtype)
        call = AttentionLayer(
            cache.keys[layer].data_ptr(),
            cache.values[layer].data_ptr(),
            _rows(query),
            _rows(output),
        )
        self._library.polychip_attention(self._engine, plan.address, byref(call))
        return output

    def _attends(self, query: torch.Tensor) -> bool:
        """False if the other attention is to compute the step."""
        if query.shape[-1] <= HEAD_SIZE_MAX:
            return True
        if self._owner.recorded_outputs is not None:
            raise UnsupportedOperation(
                f"attention of heads of {query.shape[-1]} cannot be captured, only up to "
                f"{HEAD_SIZE_MAX}"
            )
        return False

    def _side_by_side(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers of a row side by side, as the kernels read them; rows may lie anywhere."""
        if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
            return tensor
        return self._contiguous(tensor)

    def _contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor
        if self._owner.recorded_outputs is not None:
            raise UnsupportedOperation(f"a copy of strides {tensor.stride()} cannot be captured")
        return tensor.contiguous()


@dataclass(frozen=True)
class _Scores:
    """How scores are made, as `attention` in `kernels.spec` takes it."""

    q_to_kv: tuple[int, ...]
    scale: float
    window: int
    soft_cap: float


class _AttentionPlan(StepPlan):
    """A native plan, and what it points to."""

    def __init__(
        self,
        engine: Engine,
        cache: PagedKV,
        query: torch.Tensor,
        scores: "_Scores",
    ) -> None:
        """Raises IndexError for a block that is not there."""
        cached = cache.keys[0]
        assert query.dtype == cached.dtype, f"{query.dtype} with keys of {cached.dtype}"
        heads = scores.q_to_kv
        assert 0 <= min(heads) <= max(heads) < cached.shape[2], heads
        self._engine = engine
        self._library = engine.library
        self._query_shape = query.shape
        self._q_to_kv = np.array(heads, dtype=np.int64)
        self._scores = scores
        step = self._describe(cache)
        self.address = self._library.polychip_attention_plan(engine.address, byref(step))
        if not self.address:
            raise _no_such_block(cache)
        free = self._library.polychip_attention_plan_free
        weakref.finalize(self, free, self.address).atexit = False

    @override
    def renew(self, cache: PagedKV) -> None:
        step = self._describe(cache)
        if not self._library.polychip_attention_plan_renew(
            self._engine.address, self.address, byref(step)
        ):
            raise _no_such_block(cache)

    @property
    def tokens_spared(self) -> int:
        """Those that are not read for a row, because they were for another one; tests ask."""
        return int(self._library.polychip_attention_plan_tokens_spared(self.address))

    def _describe(self, cache: PagedKV) -> AttentionStep:
        cached, tables = cache.keys[0], cache.block_tables.contiguous()
        starts, contexts, table_starts = self._kept = [
            np.array(numbers, dtype=np.int64)
            for numbers in (cache.query_starts, cache.context_starts, cache.table_starts)
        ]
        self._tables = tables
        _, query_heads, head_size = self._query_shape
        return AttentionStep(
            NUMBERS[cached.dtype],
            len(contexts),
            starts.ctypes.data,
            contexts.ctypes.data,
            table_starts.ctypes.data,
            tables.data_ptr(),
            tables.shape[1],
            cached.shape[0],
            cache.block_tokens,
            cached.stride(0) * cached.element_size(),
            query_heads,
            cached.shape[2],
            head_size,
            self._q_to_kv.ctypes.data,
            self._scores.scale,
            self._scores.window,
            self._scores.soft_cap,
        )


def _no_such_block(cache: PagedKV) -> IndexError:
    return IndexError(f"a block table names a block that is not of the {cache.keys[0].shape[0]}")


def _rows(tensor: torch.Tensor) -> Rows:
    """[outer, size] or [outer, inner, size]."""
    strides = tensor.stride()
    return Rows(tensor.data_ptr(), strides[0], strides[1] if len(strides) == 3 else 0)

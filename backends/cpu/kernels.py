"""Operations on CPU cores by torch's fused kernels, and which are chosen beside the native ones.

Each agrees with the reference it replaces.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional

from backends.cpu.attention import PagedAttention
from backends.cpu.kernel_library import Engine
from backends.cpu.native_kernels import NativeKernels
from backends.cpu.native_sampling import NativeSampling
from backends.cpu.sampling import adjust_logits, sample, token_logprobs
from backends.scratch import ScratchArena
from kernels.paged_kv import PAGED_ORDER, PagedKV
from kernels.spec import SOFT_CAP, WINDOW, Implementation, Support

_LOGITS_ROWS = 1024
"""Vocabulary rows widened at a time: some megabytes, about what a core's own cache holds."""


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, first_row: int, scale: float
) -> torch.Tensor:
    """A lookup; the mask is skipped where the whole vocabulary is on this chip."""
    if first_row == 0 and bool(((ids >= 0) & (ids < weight.shape[0])).all()):
        found = functional.embedding(ids, weight)
    else:
        local = ids - first_row
        foreign = (local < 0) | (local >= weight.shape[0])
        found = functional.embedding(local.masked_fill(foreign, 0), weight)
        found.masked_fill_(foreign[:, None], 0)
    return found if scale == 1.0 else found.float().mul_(scale).to(found.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """torch's own kernel, which sums in float32."""
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """An addition and a norm, both in float32."""
    total = residual.float() + x
    normed = functional.rms_norm(total, (total.shape[-1],), weight.float(), epsilon)
    return normed.to(x.dtype), total


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, context: object | None
) -> torch.Tensor:
    """oneDNN or MKL, as torch chooses."""
    assert context is None, "row-to-adapter maps are not defined yet"
    return functional.linear(x, weight, bias)


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One product in float32; torch has none of bfloat16 operands with a float32 result."""
    if weight.dtype == torch.float32:
        return functional.linear(hidden, weight)
    wide = hidden.float()
    vocabulary, hidden_size = weight.shape
    output = wide.new_empty((wide.shape[0], vocabulary))
    # Part by part, in the same place: the widened rows stay in the cache, no second copy of the
    # head is in memory, and fresh memory would cost more than the product.
    widened = wide.new_empty((min(_LOGITS_ROWS, vocabulary), hidden_size))
    for start in range(0, vocabulary, _LOGITS_ROWS):
        rows = weight[start : start + _LOGITS_ROWS]
        part = widened[: len(rows)].copy_(rows)
        output[:, start : start + len(rows)] = functional.linear(wide, part)
    return output


def rotary(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Two products and a sum over the whole head: x * cos + (-second, first) * sin."""
    cosine, sine = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    output = torch.empty_like(x)
    torch.sub(first * cosine, second * sine, out=output[..., :half])
    torch.add(second * cosine, first * sine, out=output[..., half:])
    return output


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """torch's silu, then the product in place."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """torch's gelu, then the product in place."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """In one place: a vocabulary's logits are many."""
    return logits.div(cap).tanh_().mul_(cap)


def write_kv(cache: PagedKV, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """One scatter each into the layer's blocks."""
    places = (cache.token_blocks, cache.token_places)
    cache.keys[layer].index_put_(places, key)
    cache.values[layer].index_put_(places, value)


_ANY = Support()
_PAGED = Support(layouts=(PAGED_ORDER,))
_PAGED_ATTENTION = Support(layouts=(PAGED_ORDER,), features=(WINDOW, SOFT_CAP))

_TORCH = (
    Implementation("embedding", "torch", embedding, _ANY),
    Implementation("linear", "torch", linear, _ANY),
    Implementation("logits", "torch", logits, _ANY),
    Implementation("rms_norm", "torch", rms_norm, _ANY),
    Implementation("add_rms_norm", "torch", add_rms_norm, _ANY),
    Implementation("rotary", "torch", rotary, _ANY),
    Implementation("silu_mul", "torch", silu_mul, _ANY),
    Implementation("gelu_mul", "torch", gelu_mul, _ANY),
    Implementation("write_kv", "torch", write_kv, _PAGED),
    Implementation("sample", "numpy", sample, _ANY),
    Implementation("token_logprobs", "torch", token_logprobs, _ANY),
)
_ALWAYS = (
    Implementation("soft_cap", "torch", soft_cap, _ANY),
    Implementation("adjust_logits", "torch", adjust_logits, _ANY),
)


def cpu_implementations(
    find_scratch: Callable[[], ScratchArena], engine: Engine | None
) -> Sequence[Implementation]:
    """All operations; find_scratch: the scratch of the open chip; engine: None for torch alone.

    With an engine weights are packed, which only the native kernels read.
    """
    attention = PagedAttention(find_scratch)
    if engine is not None:
        native = NativeKernels(engine, attention).implementations()
        return (*native, *NativeSampling(engine).implementations(), *_ALWAYS)
    return (
        *_TORCH,
        *_ALWAYS,
        Implementation("attention", "torch-sdpa", attention, _PAGED_ATTENTION),
    )

"""What the chip's kernels compute, on memory that is readable when they run; float32 inside.

Written on its own, from the operations' words: a mistake shared with another backend's kernels
would be found by neither. Each function fills outputs that its caller allocated.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

_TILE_ROWS = 2048
"""Rows of a weight widened at a time, so that no second copy of a matrix is in memory."""
_TILE_QUERIES = 128
"""Queries of a row whose scores are in memory together."""


def embed(ids: torch.Tensor, weight: torch.Tensor, first_row: int, output: torch.Tensor) -> None:
    """Looks up the ids this chip holds and leaves the other rows at zero."""
    places = ids.long() - first_row
    output.zero_()
    held = torch.nonzero((places >= 0) & (places < weight.shape[0])).squeeze(-1)
    output.index_copy_(0, held, weight.index_select(0, places.index_select(0, held)))


def normalize(x: torch.Tensor, weight: torch.Tensor, epsilon: float, output: torch.Tensor) -> None:
    """x over its root mean square, times the weight."""
    wide = x.float()
    squares = torch.einsum("th,th->t", wide, wide)
    root = squares.div_(x.shape[-1]).add_(epsilon).sqrt_()
    output.copy_((wide / root.unsqueeze(-1)).mul_(weight))


def add_and_normalize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    output: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """The sum stays as wide as `total` is; only its norm is rounded."""
    torch.add(x.float(), residual, out=total)
    normalize(total, weight, epsilon, output)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor
) -> None:
    """x times the transposed weight, tile by tile of the weight's rows; rounded once."""
    if weight.dtype == output.dtype == torch.float32:
        torch.mm(x, weight.T, out=output)
        if bias is not None:
            output.add_(bias)
        return
    wide = x.float()
    for start in range(0, weight.shape[0], _TILE_ROWS):
        rows = slice(start, start + _TILE_ROWS)
        product = wide @ weight[rows].float().T
        if bias is not None:
            product += bias[rows]
        output[:, rows] = product


def rotate(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, output: torch.Tensor
) -> None:
    """(x[i], x[i + d/2]) as one complex number, times the complex number of the angle."""
    half = x.shape[-1] // 2
    turns = cos_sin.index_select(0, positions.long())
    turns = torch.complex(turns[:, :half], turns[:, half:]).unsqueeze(1)
    wide = x.float()
    turned = torch.complex(wide[..., :half], wide[..., half:]) * turns
    output[..., :half] = turned.real
    output[..., half:] = turned.imag


def gate(gate_up: torch.Tensor, output: torch.Tensor) -> None:
    """gate / (1 + e^-gate) * up."""
    half = gate_up.shape[-1] // 2
    gates = gate_up[..., :half].float()
    output.copy_(gates.neg().exp_().add_(1.0).reciprocal_().mul_(gates).mul_(gate_up[..., half:]))


def gelu_gate(gate_up: torch.Tensor, output: torch.Tensor) -> None:
    """gate / (1 + e^-2y) * up, y = sqrt(2 / pi) (gate + 0.044715 gate^3); (1 + tanh y) / 2."""
    half = gate_up.shape[-1] // 2
    gates = gate_up[..., :half].float()
    exponents = gates.pow(3).mul_(0.044715).add_(gates).mul_(-2.0 * math.sqrt(2.0 / math.pi))
    output.copy_(exponents.exp_().add_(1.0).reciprocal_().mul_(gates).mul_(gate_up[..., half:]))


def multiply_by(x: torch.Tensor, number: float) -> None:
    """In place."""
    x.copy_(x.float() * number)


def write_slots(
    cache_keys: torch.Tensor,
    cache_values: torch.Tensor,
    blocks: torch.Tensor,
    places: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Puts token t at place places[t] of block blocks[t]; blocks may lie apart."""
    chosen = (as_words(blocks), as_words(places))
    as_words(cache_keys)[chosen] = as_words(key)
    as_words(cache_values)[chosen] = as_words(value)


@dataclass(frozen=True)
class Scores:
    """What becomes of a product of query and key before the softmax.

    window: how many tokens a query sees, itself included, 0 for all. soft_cap: 0 for none.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    context: int,
    rule: Scores,
    output: torch.Tensor,
) -> None:
    """One row: query [n, h, d] at positions context .. context + n of the tokens in `blocks`.

    keys, values: a layer's cache [blocks, block_tokens, k, d]; h is a multiple of k. Each tile of
    queries sees the tokens up to its own last one, from the first that its first one sees.
    """
    count, heads, size = query.shape
    skipped = _first_seen(context, rule.window) // keys.shape[1]
    base = skipped * keys.shape[1]
    chosen = blocks[skipped : math.ceil((context + count) / keys.shape[1])].long()
    by_head = [
        cache.index_select(0, chosen).flatten(0, 1).float().transpose(0, 1)
        for cache in (keys, values)
    ]
    kv_heads = keys.shape[2]
    for start in range(0, count, _TILE_QUERIES):
        stop = min(count, start + _TILE_QUERIES)
        first, end = _first_seen(context + start, rule.window), context + stop
        seen = slice(first - base, end - base)
        # [n, k, g, d] -> [k, n * g, d]: the query heads of a key head are further queries of it.
        grouped = query[start:stop].float().view(stop - start, kv_heads, -1, size).mul(rule.scale)
        rows = grouped.transpose(0, 1).reshape(kv_heads, -1, size)
        scores = torch.bmm(rows, by_head[0][:, seen].transpose(1, 2))
        if rule.soft_cap:
            scores.div_(rule.soft_cap).tanh_().mul_(rule.soft_cap)
        if stop - start > 1:
            hidden = _hidden(context + start, stop - start, range(first, end), rule.window)
            scores.view(kv_heads, stop - start, -1, end - first).masked_fill_(hidden, -math.inf)
        weights = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
        sums = weights.sum(dim=-1, keepdim=True)
        mixed = torch.bmm(weights, by_head[1][:, seen]).div_(sums)
        mixed = mixed.view(kv_heads, stop - start, -1, size).transpose(0, 1)
        output[start:stop].view(stop - start, kv_heads, heads // kv_heads, size).copy_(mixed)


def _first_seen(position: int, window: int) -> int:
    return max(0, position + 1 - window) if window else 0


def _hidden(first: int, count: int, tokens: range, window: int) -> torch.Tensor:
    """[n, 1, tokens] bool: what each of `count` queries from position `first` on does not see."""
    own = torch.arange(first, first + count).view(-1, 1, 1)
    positions = torch.arange(tokens.start, tokens.stop)
    hidden = positions > own
    return hidden | (positions + window <= own) if window else hidden


def as_words(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A view for numpy, which has no bfloat16: whole numbers of the same width."""
    words = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return words.numpy()

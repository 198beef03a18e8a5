"""The definition of every operation: plain torch, slow and clear; backends are compared with it.

Each function follows the signature of its name in `kernels.spec`. Arithmetic is in float32 whatever
the dtype of the operands, and the result is rounded once to the operands' dtype.
"""

import torch
import torch.nn.functional as functional

from kernels.paged_kv import PAGED_ORDER, PagedKV
from kernels.sampling_reference import adjust_logits, sample, token_logprobs
from kernels.spec import SOFT_CAP, WINDOW, Implementation, Support

# Behind every native kernel: a backend's own implementations have lower ranks.
REFERENCE_RANK = 1_000_000


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, first_row: int, scale: float
) -> torch.Tensor:
    """Rows of `weight` times `scale`; zeros for ids that another chip holds."""
    local = ids - first_row
    held = (local >= 0) & (local < weight.shape[0])
    rows = weight[torch.where(held, local, 0)].float() * scale
    return torch.where(held[:, None], rows, torch.zeros_like(rows)).to(weight.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum is kept in float32; only its norm is rounded."""
    total = x.float() + residual.float()
    return rms_norm(total, weight, epsilon).to(x.dtype), total


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, context: object | None
) -> torch.Tensor:
    """x @ weight^T + bias."""
    assert context is None, "row-to-adapter maps are not defined yet"
    result = x.float() @ weight.float().T
    if bias is not None:
        result = result + bias.float()
    return result.to(x.dtype)


def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden @ weight^T, kept in float32."""
    return hidden.float() @ weight.float().T


def rotary(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotates (x[i], x[i + d/2]) by the angle of the token's position and of i."""
    cosine, sine = cos_sin[positions].float().chunk(2, dim=-1)
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(gate) * up."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate / 2 * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) * up."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def soft_cap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Nearly the logits while they are small beside `cap`, never beyond it."""
    return cap * torch.tanh(logits / cap)


def write_kv(cache: PagedKV, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Puts each token's key and value at the token's place in its block."""
    cache.keys[layer][cache.token_blocks, cache.token_places] = key
    cache.values[layer][cache.token_blocks, cache.token_places] = value


def attention(
    cache: PagedKV,
    layer: int,
    query: torch.Tensor,
    q_to_kv: tuple[int, ...],
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """softmax(scale * q k^T) v for each row, over positions up to the token's own.

             0 ......... context_start ......... context_start + n
             [ context  ][ own tokens           ]
    token i  sees 0 .. context_start + i, of them the last `window`
    """
    heads = torch.tensor(q_to_kv)
    output = torch.empty_like(query)
    for row, context_start in enumerate(cache.context_starts):
        tokens = slice(cache.query_starts[row], cache.query_starts[row + 1])
        own = torch.arange(context_start, context_start + tokens.stop - tokens.start)
        if not len(own):
            continue
        # What no token sees is not read: it may be anything, or given back.
        first = max(0, context_start - window + 1) if window else 0
        seen = torch.arange(first, int(own[-1]) + 1)
        keys = _row_tokens(cache, cache.keys[layer], row, seen)[:, heads]
        values = _row_tokens(cache, cache.values[layer], row, seen)[:, heads]
        scores = torch.einsum("qhd,lhd->hql", query[tokens].float(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        hidden = seen[None, :] > own[:, None]
        if window:
            hidden |= seen[None, :] <= own[:, None] - window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        output[tokens] = torch.einsum("hql,lhd->qhd", weights, values).to(query.dtype)
    return output


def _row_tokens(
    cache: PagedKV, arena: torch.Tensor, row: int, positions: torch.Tensor
) -> torch.Tensor:
    """A row's tokens at these positions, of one layer: [n, kv_heads, head_size] float32."""
    places = positions - cache.table_starts[row]
    assert places[0] >= 0, f"position {int(positions[0])} of row {row} is not held any more"
    blocks = cache.block_tables[row, places // cache.block_tokens]
    return arena[blocks, places % cache.block_tokens].float()


_PAGED = Support(layouts=(PAGED_ORDER,))
_PAGED_ATTENTION = Support(layouts=(PAGED_ORDER,), features=(WINDOW, SOFT_CAP))

REFERENCE_IMPLEMENTATIONS: list[Implementation] = [
    Implementation(operation, "reference", function, support, REFERENCE_RANK)
    for operation, function, support in (
        ("embedding", embedding, Support()),
        ("rms_norm", rms_norm, Support()),
        ("add_rms_norm", add_rms_norm, Support()),
        ("linear", linear, Support()),
        ("logits", logits, Support()),
        ("rotary", rotary, Support()),
        ("silu_mul", silu_mul, Support()),
        ("gelu_mul", gelu_mul, Support()),
        ("soft_cap", soft_cap, Support()),
        ("write_kv", write_kv, _PAGED),
        ("attention", attention, _PAGED_ATTENTION),
        ("adjust_logits", adjust_logits, Support()),
        ("sample", sample, Support()),
        ("token_logprobs", token_logprobs, Support()),
    )
]

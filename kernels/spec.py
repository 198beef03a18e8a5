"""The operations a model is written over: names, meaning, and what an implementation declares.

`kernels.reference` defines each operation; `backends.interface` builds the kernel table on these
records. Imports nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OperationSpec:
    """One operation: its name, its signature in words, and the arguments it writes in place."""

    name: str
    signature: str
    writes: tuple[str, ...] = ()


WINDOW = "window"
"""Attention: a token sees only so many before it."""
SOFT_CAP = "soft_cap"
"""Attention: scores are bounded before their softmax."""
FEATURES = {"attention": (WINDOW, SOFT_CAP)}
"""What some models ask of an operation beyond the plain one."""


def feature_name(operation: str, feature: str) -> str:
    """How a feature is named beside the operations."""
    return f"{operation}:{feature}"


@dataclass(frozen=True)
class Support:
    """What an implementation accepts; checked when a model is bound, never by trying.

    dtypes are names such as "float32"; an empty tuple means any. layouts: orders of a KV block.
    """

    dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    rows_max: int | None = None
    """Most rows of a call; None is any number."""
    alignment_elements: int = 1
    """The last dimension must be a multiple of it."""
    contiguous: bool = False
    """It reads contiguous tensors only, and computes nonsense from others."""
    features: tuple[str, ...] = ()
    """What beyond the plain operation it computes, such as WINDOW."""


@dataclass(frozen=True)
class Requirement:
    """What a model asks of an operation when it is bound: the most and worst of all its calls."""

    dtype: str
    layout: str = ""
    rows: int = 1
    last_dimension: int = 1
    contiguous: bool = False
    """No call passes a view that is not contiguous."""
    features: tuple[str, ...] = ()
    """What calls ask for beyond the plain operation, such as WINDOW."""


@dataclass(frozen=True)
class Implementation:
    """A way to compute an operation; lower `rank` is preferred, the reference comes last."""

    operation: str
    name: str
    function: Callable[..., Any]
    support: Support = Support()
    rank: int = 0


@dataclass(frozen=True)
class Choice:
    """The implementation bound to an operation and why it was; every other one and why not."""

    operation: str
    implementation: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    """Name and reason of each other candidate, in order of preference."""


class BoundKV:
    """Opaque to models: a pool's arena with the rows of one step, valid until the step ends.

    Each memory pool makes its own subclass; only kernels that declare its layout look inside.
    """


# T tokens, H hidden size, h query heads and k key/value heads on this chip, d head size,
# V rows of the vocabulary on this chip, R sampled rows. A Matrix is what `Device.allocate_matrix`
# makes, opaque to all others; everything else is a tensor.
OPERATIONS: dict[str, OperationSpec] = {
    spec.name: spec
    for spec in (
        OperationSpec(
            "embedding",
            "(ids [T] int64, weight [V, H] Matrix or tensor, first_row: int, scale: float) -> [T, "
            "H], rows times scale, rounded once; an id outside [first_row, first_row + V) gives a "
            "row of zeros",
        ),
        OperationSpec("rms_norm", "(x [..., H], weight [H], epsilon: float) -> [..., H]"),
        OperationSpec(
            "add_rms_norm",
            "(x [T, H], residual [T, H], weight [H], epsilon: float) -> (rms_norm(x + residual) "
            "[T, H] in x's dtype, x + residual [T, H] float32: a sum over layers loses too much "
            "in a narrower dtype); residual may be float32 already",
        ),
        OperationSpec(
            "linear",
            "(x [T, K], weight [N, K] Matrix, bias [N] or None, context: object or None) -> [T, "
            "N]; context is reserved for a row-to-adapter map",
        ),
        OperationSpec(
            "logits",
            "(hidden [R, H], weight [V, H] Matrix) -> [R, V] float32, never rounded to a narrower "
            "dtype: near 25 bfloat16 moves in steps of 0.125, which makes ties of what are none",
        ),
        OperationSpec(
            "rotary",
            "(x [T, n, d], positions [T] int64, cos_sin [P, d] float32: d/2 cosines then d/2 "
            "sines) -> [T, n, d]; rotates the halves (x[i], x[i + d/2])",
        ),
        OperationSpec("silu_mul", "(gate_up [T, 2I]: gate then up) -> silu(gate) * up [T, I]"),
        OperationSpec(
            "gelu_mul",
            "(gate_up [T, 2I]: gate then up) -> gelu(gate) * up [T, I], gelu by its tanh formula",
        ),
        OperationSpec(
            "soft_cap", "(logits [R, V] float32, cap: float) -> cap * tanh(logits / cap) [R, V]"
        ),
        OperationSpec(
            "write_kv",
            "(cache: BoundKV, layer: int, key [T, k, d], value [T, k, d]) -> None",
            writes=("cache",),
        ),
        OperationSpec(
            "attention",
            "(cache: BoundKV, layer: int, query [T, h, d], q_to_kv: tuple of h ints, scale: float, "
            "window: int, soft_cap: float) -> [T, h, d]; causal over the row's context, the "
            "chunk's own keys included. A window above 0 (feature WINDOW) is how many tokens one "
            "sees, itself included; a soft_cap above 0 (feature SOFT_CAP) makes of each scaled "
            "score s soft_cap * tanh(s / soft_cap)",
        ),
        OperationSpec(
            "adjust_logits",
            "(logits [R, V] float32, row [N] int64, token [N] int64, bias [N] float32, "
            "output_count [N] int64, presence [N] float32, frequency [N] float32, repetition [N] "
            "float32) -> [R, V] float32, a copy in which each named logit l, no pair (row, token) "
            "twice, is: l + bias; then divided by repetition if positive, else multiplied by it; "
            "then less frequency * output_count, and less presence if output_count > 0. A bias of "
            "-inf keeps a token from being drawn; what would leave the range of float32 stops at "
            "its ends",
        ),
        OperationSpec(
            "sample",
            "(logits [R, V] float32, temperature [R] float32, seed [R] int64 (bits of a uint64), "
            "choice [R] int64, index [R] int64, top_k [R] int64, top_p [R] float32, min_p [R] "
            "float32) -> (ids [R] int64, finite [R] bool); temperature 0 is argmax, lowest id on "
            "a tie. Else the draw is over softmax(logits / temperature) of the tokens that "
            "survive, in this order and each renormalized: the top_k likeliest (0: all), the "
            "shortest run of the likeliest that sums to top_p (one at least; 1: all), those with "
            "min_p times the likeliest at least; the lower id counts as likelier on a tie. A logit "
            "of -inf is never drawn. finite: False for a row with a NaN, +inf, or nothing but "
            "-inf; its id is 0",
        ),
        OperationSpec(
            "token_logprobs",
            "(logits [R, V] float32, ids [R] int64, tops_count: int <= V) -> "
            "(log_softmax(logits)[ids] [R] float32, log_softmax of the tops_count largest logits, "
            "descending, lowest id first on a tie [R, tops_count] float32, their ids [R, "
            "tops_count] int64); NaN and the lowest ids for a row that `sample` calls not finite",
        ),
    )
}

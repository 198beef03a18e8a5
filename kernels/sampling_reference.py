"""The definition of the operations behind a step's tokens: adjusting, drawing, log-probabilities.

Each follows the signature of its name in `kernels.spec`. Whatever is compared or summed is float64,
so that another order of summing changes no choice.
"""

import torch

# The splitmix64 generator (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators",
# OOPSLA 2014; constants of Vigna's splitmix64.c, public domain), written as signed 64-bit numbers
# because torch has no arithmetic on unsigned ones; sums and products wrap around alike.
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_SECOND = 0x94D049BB133111EB - (1 << 64)


def adjust_logits(
    logits: torch.Tensor,
    row: torch.Tensor,
    token: torch.Tensor,
    bias: torch.Tensor,
    output_count: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Bias, then the penalties; the rest of the logits stays as it is."""
    biased = logits[row, token].double() + bias.double()
    repeated = torch.where(biased > 0, biased / repetition.double(), biased * repetition.double())
    penalized = (
        repeated - frequency.double() * output_count - presence.double() * (output_count > 0)
    )
    limit = torch.finfo(torch.float32).max
    # What is infinite from the start stays so: forbidden, or a fault of the model to be seen.
    bounded = torch.where(biased.isfinite(), penalized.clamp(-limit, limit), penalized)
    adjusted = logits.clone()
    adjusted[row, token] = bounded.float()
    return adjusted


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    choice: torch.Tensor,
    index: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """argmax of surviving logits / temperature + Gumbel noise; plain argmax at temperature 0."""
    finite = has_softmax(logits)
    logits = torch.where(finite[:, None], logits, 0.0)
    drawn = temperature > 0
    survivors = filtered_logits(logits, torch.where(drawn, temperature, 1.0), top_k, top_p, min_p)
    scores = survivors + gumbel_noise(seed, choice, index, logits.shape[-1])
    ids = torch.where(drawn, scores.argmax(dim=-1), logits.argmax(dim=-1))
    return torch.where(finite, ids, 0), finite


def filtered_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """logits / temperature [R, V] float64, -inf where a filter drops a token; temperature > 0.

    ranks      0   1   2   3   4   5 ...        tokens, likeliest first
    top_k      [ rank < k     ]
    top_p      [ sum before < p ]               of the probabilities that top_k left
    min_p      [ weight >= min_p ]              weight: probability / that of rank 0
    """
    scaled = logits.double() / temperature.double()[:, None]
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1])[None, :]
    kept = (ranks < top_k[:, None]) | (top_k <= 0)[:, None]
    weights = torch.where(kept, torch.exp(ordered - ordered[:, :1]), 0.0)
    sums_before = torch.cat([torch.zeros_like(weights[:, :1]), weights.cumsum(dim=-1)[:, :-1]], -1)
    wanted_sum = top_p.double()[:, None] * weights.sum(dim=-1, keepdim=True)
    kept &= (sums_before < wanted_sum) | (top_p >= 1)[:, None] | (ranks == 0)
    kept &= weights >= min_p.double()[:, None]
    return torch.empty_like(scaled).scatter(-1, ids, ordered.masked_fill(~kept, float("-inf")))


def token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, tops_count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The log-softmax of the tokens drawn and of the likeliest ones."""
    finite = has_softmax(logits)[:, None]
    logits = torch.where(finite, logits, 0.0)
    logprobs = torch.where(finite, torch.log_softmax(logits.double(), dim=-1), float("nan"))
    # By the logits themselves: the subtraction in a softmax could make ties of what are none.
    top_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :tops_count]
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    return chosen.float(), logprobs.gather(-1, top_ids).float(), top_ids


def has_softmax(logits: torch.Tensor) -> torch.Tensor:
    """[R] bool: no NaN, no +inf, and something above -inf."""
    bad = logits.isnan() | logits.isposinf()
    return ~bad.any(dim=-1) & ~logits.isneginf().all(dim=-1)


def gumbel_noise(
    seed: torch.Tensor, choice: torch.Tensor, index: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """g(seed, choice, index, token id) for ids below `vocabulary`: [R, vocabulary] float64.

    Token v takes output v of the splitmix64 generator whose state is a hash of the other three: a
    draw depends neither on the other rows of the batch nor on the size of the vocabulary.
    """
    state = _mix(seed + _GOLDEN_GAMMA)
    state = _mix(state + choice + _GOLDEN_GAMMA)
    state = _mix(state + index + _GOLDEN_GAMMA)
    counters = torch.arange(1, vocabulary + 1) * _GOLDEN_GAMMA
    bits = _mix(state[:, None] + counters[None, :])
    # 52 bits and a half: the largest, 1 - 2^-53, is still a float64 below 1.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mix(state: torch.Tensor) -> torch.Tensor:
    """The output function of splitmix64."""
    state = (state ^ _shift_right(state, 30)) * _MIX_FIRST
    state = (state ^ _shift_right(state, 27)) * _MIX_SECOND
    return state ^ _shift_right(state, 31)


def _shift_right(state: torch.Tensor, count: int) -> torch.Tensor:
    """A shift that fills with zeros; torch's own copies the sign bit."""
    return (state >> count) & ((1 << (64 - count)) - 1)

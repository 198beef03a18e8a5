"""Exact distributions of drawn tokens in plain Python, and the statistics that draws must pass."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

# The 99.99 % point of the normal distribution.
NORMAL_LIMIT = 3.719


def drawn_probabilities(
    logits: Sequence[float],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """Probability of each token: the filters one after the other, each renormalized."""
    highest = max(logits)
    weights = {i: math.exp((logit - highest) / temperature) for i, logit in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    if top_k > 0:
        order = order[:top_k]
    total = math.fsum(weights[i] for i in order)
    kept: list[int] = []
    reached = 0.0
    for i in order:
        if kept and top_p < 1 and reached >= top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    kept = [i for i in kept if weights[i] >= min_p * weights[kept[0]]]
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


def check_draws(drawn: Iterable[int], probabilities: Sequence[float]) -> None:
    """The draws pass a chi-square test at 0.01 %, and no forbidden token is among them."""
    counts = Counter(drawn)
    draws_count = counts.total()
    forbidden = [i for i, probability in enumerate(probabilities) if probability == 0 and counts[i]]
    assert not forbidden, f"forbidden tokens were drawn: {forbidden}"
    # Tokens too rare for the test, fewer than 5 expected, make one cell together.
    cells = [(0.0, 0)]
    for i, probability in enumerate(probabilities):
        expected = probability * draws_count
        if expected >= 5:
            cells.append((expected, counts[i]))
        else:
            cells[0] = (cells[0][0] + expected, cells[0][1] + counts[i])
    cells = [cell for cell in cells if cell[0] > 0]
    statistic = sum((found - expected) ** 2 / expected for expected, found in cells)
    assert statistic <= chi_square_limit(len(cells) - 1), (statistic, cells)


def chi_square_limit(degrees: int) -> float:
    """The 99.99 % point of chi-square by Wilson and Hilferty: its cube root is nearly normal."""
    if degrees == 0:
        return 1e-9
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + NORMAL_LIMIT * math.sqrt(spread)) ** 3

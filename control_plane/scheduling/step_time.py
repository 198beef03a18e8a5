"""How long a step takes: a small linear model, fitted online from the steps of one group."""

LEARNING_RATE = 0.3
"""Part of the error that one step corrects."""

TRUST = (1.0, 0.01, 0.1, 0.1)
"""How readily each weight takes its part of a correction: base, rows, chunk, context."""


class StepTimeModel:
    """seconds = base + per row + per 100 chunk tokens + per 10,000 context tokens.

    Normalized least mean squares: no state that could drift when all steps look alike. Errors of
    the last steps widen `margin_s`, so that a planner plans earlier where the model is poor.
    """

    def __init__(self, decode_step_s: float = 0.0, prefill_tokens_per_s: float = 0.0) -> None:
        per_chunk_s = 100 / prefill_tokens_per_s if prefill_tokens_per_s > 0 else 0.0
        self._weights = [max(0.0, decode_step_s), 0.0, per_chunk_s, 0.0]
        self._error_s = 0.0
        self.is_known = decode_step_s > 0
        """False until a step or a warm-up was measured."""

    @property
    def margin_s(self) -> float:
        """How much earlier than predicted a step may well end."""
        return 2 * self._error_s

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Measured marginal rate of prefill; None while unknown."""
        per_chunk_s = self._weights[2]
        return 100 / per_chunk_s if per_chunk_s > 1e-9 else None

    def predict(self, rows: int, chunk_tokens: int, context_tokens: int) -> float:
        """Expected seconds of a step; context_tokens is the sum over its rows."""
        base, per_row, per_chunk, per_context = self._weights
        _, row, chunk, context = _features(rows, chunk_tokens, context_tokens)
        return base + per_row * row + per_chunk * chunk + per_context * context

    def observe(self, rows: int, chunk_tokens: int, context_tokens: int, seconds: float) -> None:
        """Learns from a measured step."""
        features = _features(rows, chunk_tokens, context_tokens)
        error = seconds - self.predict(rows, chunk_tokens, context_tokens)
        self._error_s = 0.8 * self._error_s + 0.2 * abs(error)
        power = sum(t * x * x for t, x in zip(TRUST, features, strict=True))
        for i, (trust, x) in enumerate(zip(TRUST, features, strict=True)):
            moved = self._weights[i] + LEARNING_RATE * error * trust * x / power
            self._weights[i] = max(0.0, moved)
        self.is_known = True


def _features(
    rows: int, chunk_tokens: int, context_tokens: int
) -> tuple[float, float, float, float]:
    return (1.0, float(rows), chunk_tokens / 100, context_tokens / 10_000)

"""How long a step takes: a linear model, fitted online from the steps of one group.

seconds = a fixed time
        + per token of a chunk          + per token of a chunk and token it attends to
        + per decode row                + per token that decode rows attend to
"""

import math
from operator import add, mul
from typing import NamedTuple

MEMORY = 0.95
"""Weight of a step once another of its kind was measured: the last 20 or so count."""

SURPRISED_MEMORY = 0.6
"""The same if that took a time nothing explained: perhaps the earlier ones are out of date."""

SIZE_MEMORY = 0.98
"""How fast the size of chunks that were tried fades: large ones weigh more, so they last longer."""

SWEEPS = 4
"""Passes over the weights after each step; the next step goes on from where they lead."""

DOUBT = 0.5
"""Relative error that is allowed for at first beside those measured: the warm-up had one row, and
the first steps may pay for what is set up on demand."""

ERROR_MEMORY = 0.8
"""What a further step leaves of earlier errors, and of the doubt."""

ERROR_MAX = 0.5
"""No greater error is told."""

OVERRUN_GROWTH = 0.3
"""A step that takes more above its prediction than others lately counts so much..."""

OVERRUN_MEMORY = 0.98
"""...and every other one leaves so much of it."""

TRUSTED_ERRORS = 3.0
"""A step teaches no more than what so many usual errors explain..."""

USUAL_ERROR_LEAST = 0.05
"""...of at least this size: a machine that stands still once says nothing about the next step."""

SHORT_S = 0.001
"""Errors count in relation to a step's time, but not more for much shorter steps than this."""

ATTENTION_TOKENS = 4096
"""Assumed at first: attending to so many tokens costs a prompt's token what all the rest does. By
count of operations that holds for the smallest models we know; larger ones spend less of their time
on it, so that the first step at a high position is rather planned too small."""


class StepWork(NamedTuple):
    """What a step computes.

    chunk_context: tokens that each token of a chunk attends to, summed over the tokens of chunks;
    decode_context: the same of decode rows.
    """

    chunk_tokens: int
    chunk_context: int
    decode_rows: int
    decode_context: int


def context_of_chunk(start: int, tokens_count: int) -> int:
    """Tokens that those of a chunk attend to, each to itself and to all before it."""
    return tokens_count * start + tokens_count * (tokens_count + 1) // 2


def step_seconds(
    work: StepWork,
    chunk_token_s: float,
    chunk_context_s: float,
    step_s: float,
    decode_row_s: float,
    decode_context_s: float,
) -> float:
    """The linear model itself, given what each of its terms costs."""
    return (
        chunk_token_s * work.chunk_tokens
        + chunk_context_s * work.chunk_context
        + step_s
        + decode_row_s * work.decode_rows
        + decode_context_s * work.decode_context
    )


class StepTimeModel:
    """Predicts steps from those measured lately. Costs tens of microseconds a step, holds no steps.

    Weighted least squares with exponential forgetting, all weights at least 0. The sums that make
    up the normal equations are kept; after each step a few passes of coordinate descent follow
    their solution (Franc, Hlavac, Navara: Sequential Coordinate-Wise Algorithm for the Non-negative
    Least Squares Problem, 2005). Where steps look alike and do not tell two weights apart, both
    stay about where they were.

    Steps with a chunk and steps without are forgotten apart: an hour of decoding does not wipe out
    what a chunk costs, nor the other way round.

    decode_step_s, prefill_tokens_per_s: what the warm-up measured; 0 if it did not.
    """

    def __init__(self, decode_step_s: float = 0.0, prefill_tokens_per_s: float = 0.0) -> None:
        chunk_token_s = 1 / prefill_tokens_per_s if prefill_tokens_per_s > 0 else 0.0
        attention_s = chunk_token_s / ATTENTION_TOKENS
        # In the order in which they take their part of an error: the base before the rows, which
        # are as good an explanation while there is always one.
        self._weights = [chunk_token_s, attention_s, max(0.0, decode_step_s), 0.0, 0.0]
        self._decodes = _Kind(len(self._weights))
        self._chunks = _Kind(len(self._weights))
        self._chunks.is_known = prefill_tokens_per_s > 0
        self.chunk_tokens_tried = 0.0
        """Tokens of the largest chunks measured lately."""
        self.mixed_steps_count = 0
        """Steps with decode rows and a chunk since the last one without a chunk."""
        if decode_step_s > 0:
            # As a step, it also keeps the base from explaining whatever steps with chunks take.
            self.observe(StepWork(0, 0, decode_rows=1, decode_context=1), decode_step_s)

    @property
    def is_known(self) -> bool:
        """Whether a step was measured, or a decode step in the warm-up."""
        return bool(self._decodes.is_known or self.chunk_tokens_tried)

    def prefill_tokens_per_s(self, chunk_tokens: int) -> float | None:
        """Rate of a prompt that is computed alone in chunks of this size; None while unknown."""
        context = context_of_chunk(0, chunk_tokens)
        seconds = self.predict(StepWork(chunk_tokens, context, decode_rows=0, decode_context=0))
        return chunk_tokens / seconds if seconds > 0 else None

    def predict(self, work: StepWork) -> float:
        """Expected seconds of a step."""
        return step_seconds(work, *self._weights)

    @property
    def chunk_error(self) -> float:
        """How far steps with a chunk were from what was predicted lately, as a part of that."""
        return min(self._chunks.error, ERROR_MAX)

    @property
    def decode_error(self) -> float:
        """The same of steps without a chunk."""
        return min(self._decodes.error, ERROR_MAX)

    def error(self, work: StepWork) -> float:
        """How far steps of its kind were from what was predicted lately, as a part of that."""
        return self.chunk_error if work.chunk_tokens else self.decode_error

    @property
    def chunk_caution(self) -> float:
        """The part of a step with a chunk to keep free: what only few took more than was predicted,
        and more at first."""
        return self._chunks.overrun + self._chunks.doubt

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learns from a measured step."""
        kind = self._kind(work)
        predicted = self.predict(work)
        memory = MEMORY
        if kind.is_known and predicted > 0:
            bound = TRUSTED_ERRORS * max(kind.error + kind.doubt, USUAL_ERROR_LEAST)
            error = seconds / predicted - 1
            kind.see_overrun(error)
            if abs(error) > bound:
                error = math.copysign(bound, error)
                seconds = predicted * (1 + error)
                memory = SURPRISED_MEMORY
            kind.error += (1 - ERROR_MEMORY) * (abs(error) - kind.error)
            kind.doubt *= ERROR_MEMORY
        chunk_tokens, chunk_context, decode_rows, decode_context = work
        features = (chunk_tokens, chunk_context, 1, decode_rows, decode_context)
        kind.add(features, seconds, (seconds + SHORT_S) ** -2, memory)
        self._solve()
        if work.chunk_tokens:
            self.mixed_steps_count += work.decode_rows > 0
            self.chunk_tokens_tried = max(work.chunk_tokens, SIZE_MEMORY * self.chunk_tokens_tried)
        else:
            self.mixed_steps_count = 0

    def _kind(self, work: StepWork) -> "_Kind":
        return self._chunks if work.chunk_tokens else self._decodes

    def _solve(self) -> None:
        """Coordinate descent: sets each weight in turn to what is best beside the others."""
        weights = self._weights
        rows_of_both = zip(self._chunks.products, self._decodes.products, strict=True)
        products = [list(map(add, *rows)) for rows in rows_of_both]
        targets = list(map(add, self._chunks.targets, self._decodes.targets))
        for _ in range(SWEEPS):
            for i, row in enumerate(products):
                if row[i] > 0:
                    missing = targets[i] - sum(map(mul, row, weights))
                    weights[i] = max(0.0, weights[i] + missing / row[i])


class _Kind:
    """The normal equations of steps of one kind, and their usual relative error."""

    def __init__(self, features_count: int) -> None:
        self.products = [[0.0] * features_count for _ in range(features_count)]
        self.targets = [0.0] * features_count
        self.error = 0.0
        self.overrun = 0.0
        """What the longest steps lately took above what was predicted, as a part of that."""
        self.doubt = DOUBT
        self.is_known = False
        """Whether a step or the warm-up says anything of it."""

    def see_overrun(self, error: float) -> None:
        """Follows quickly what is above it, and fades."""
        above = min(error, ERROR_MAX) - self.overrun
        self.overrun = (
            self.overrun + OVERRUN_GROWTH * above if above > 0 else OVERRUN_MEMORY * self.overrun
        )

    def add(self, features: tuple[int, ...], seconds: float, weight: float, memory: float) -> None:
        """One more step; the earlier ones fade."""
        self.is_known = True
        for i, feature in enumerate(features):
            weighted = weight * feature
            self.products[i] = [
                memory * product + weighted * other
                for product, other in zip(self.products[i], features, strict=True)
            ]
            self.targets[i] = memory * self.targets[i] + weighted * seconds

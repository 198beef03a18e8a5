"""How many prompt tokens a step may compute, so that nobody who decodes waits for it too long."""

from bisect import bisect_right
from collections.abc import Sequence

from control_plane.config import SchedulingConfig
from control_plane.scheduling.live_request import LiveRequest, Placement
from control_plane.scheduling.step_planner import has_chunk_left, prefill_demand, share_chunk
from control_plane.scheduling.step_time import StepTimeModel, StepWork, context_of_chunk

CHUNK_TOKENS_LEAST = 16
"""A step with decode rows always has room for so many prompt tokens, and the first has no more."""

GROWTH = 1.25
"""The next chunk is so many times as large as those measured lately, at most: steps are known to be
linear only about where they were measured."""

PROBE_STEPS = 32
"""After so many steps with rows and a chunk comes one without a chunk. Steps that all take as long
as the target, because the model says so, do not tell the model what rows and chunks cost each."""


class ChunkBudget:
    """The prompt tokens of one step, beside the requests that decode in it.

    A step with decode rows is to take `decode_latency_target_ms` at most, as the model predicts it,
    and what the longest ones lately took above that included. What the rows need comes first:
    where it leaves prompts less than `prefill_time_share_min` of the step, the step becomes longer
    by that much. Without decode rows, or without a target, a step has `chunk_tokens`.

    decoding: whether a request waits for its next token, in this step or for a block.
    """

    def __init__(
        self,
        config: SchedulingConfig,
        step_time: StepTimeModel,
        decodes: Sequence[LiveRequest],
        decoding: bool,
    ) -> None:
        self._chunk_tokens = config.chunk_tokens
        self._oldest_share = config.oldest_prefill_share
        self._step_time = step_time
        self._is_bounded = decoding and config.decode_latency_target_ms > 0
        contexts = [live.placement.planned_count + 1 for live in decodes if live.placement]
        self._rows = (len(contexts), sum(contexts))
        self._is_probe = bool(contexts) and step_time.mixed_steps_count >= PROBE_STEPS
        if self._is_bounded:
            target_s = config.decode_latency_target_ms / 1000 / (1 + step_time.chunk_caution)
            decode_s = step_time.predict(StepWork(0, 0, *self._rows))
            self._longest_s = max(target_s, decode_s / (1 - config.prefill_time_share_min))

    def tokens(self, prefills: Sequence[Placement]) -> int:
        """Of all chunks together, if these are the prefills; oldest first, as they share them."""
        if not self._is_bounded:
            return self._chunk_tokens
        if self._is_probe:
            return 0
        least = min(CHUNK_TOKENS_LEAST, self._chunk_tokens)
        tried = int(GROWTH * self._step_time.chunk_tokens_tried)
        most = min(self._chunk_tokens, max(least, tried))
        starts = [placement.planned_count for placement in prefills]
        demands = [prefill_demand(placement) for placement in prefills]

        def step_s(chunk_tokens: int) -> float:
            shares = share_chunk(demands, chunk_tokens, self._oldest_share)
            contexts = sum(map(context_of_chunk, starts, shares))
            return self._step_time.predict(StepWork(sum(shares), contexts, *self._rows))

        # As many more than the least as still end in time: a larger chunk never ends sooner.
        return least + bisect_right(range(least + 1, most + 1), self._longest_s, key=step_s)

    def has_left(self, prefills: Sequence[Placement]) -> bool:
        """Whether one more prefill would surely get a token of this step."""
        demands = [prefill_demand(placement) for placement in prefills]
        # With a whole chunk first: to find the tokens of a step takes longer than to see that.
        if not has_chunk_left(demands, self._chunk_tokens, self._oldest_share):
            return False
        return has_chunk_left(demands, self.tokens(prefills), self._oldest_share)

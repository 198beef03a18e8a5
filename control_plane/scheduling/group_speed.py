"""How fast a group computes, as far as its own steps tell; else as fast as others of its make.

A group that no request goes to measures nothing more. So that one bad measurement (a disturbed
machine, a first step that pays for what is set up on demand) does not keep requests away for ever,
what it measured counts for less with every request that passes it by.
"""

PACE_CHUNK_TOKENS = 128
"""Speeds are compared by prompts of so many tokens, as the warm-up measures them: nearly every
prompt is about as long or longer, so that no model of steps is asked beyond what it has seen."""

OWN_MEMORY = 8.0
"""Chunks of that size that a group remembers."""

MAKE_MEMORY = 16.0
"""The same of all groups of a make together."""

MAKE_WEIGHT = 2.0
"""A group's own chunks count beside so many of its make."""

WARM_UP_WEIGHT = 0.1
"""What a warm-up counts: it may have been the only one that paid for a first time."""

MISSED_TURN_MEMORY = 0.5
"""What an idle group's turn that it did not get leaves of what it measured. Of as many requests as
there are groups one would be its turn."""


class FadingMean:
    """A weighted mean of the last `memory` or so values of weight 1; 0 before the first."""

    def __init__(self, memory: float) -> None:
        self.value = 0.0
        self.evidence = 0.0
        """The sum of weights, as far as they still count."""
        self._memory = memory

    def add(self, value: float, weight: float) -> None:
        """One more value, of a weight above 0 and at most 1."""
        self.evidence = min(self.evidence + weight, self._memory)
        self.value += weight / self.evidence * (value - self.value)

    def fade(self, kept: float) -> None:
        """Leaves that part of its evidence."""
        self.evidence *= kept


class MakeSpeed(FadingMean):
    """Seconds of a prompt's token on all groups of one make: same backend, dtype, number of ranks.
    The more a group is used, the more it tells of it; one that rests drifts to what others measure.
    """

    def __init__(self) -> None:
        super().__init__(MAKE_MEMORY)


class GroupSpeed:
    """What to expect of one group. warm_up_rate: tokens of a prompt per second in its warm-up; 0 if
    it was not measured."""

    def __init__(self, make: MakeSpeed, warm_up_rate: float) -> None:
        self._make = make
        self._own = FadingMean(OWN_MEMORY)
        if warm_up_rate > 0:
            make.add(1 / warm_up_rate, WARM_UP_WEIGHT)

    @property
    def token_s(self) -> float:
        """Expected seconds of a prompt's token; 0 while nothing is known."""
        own, make = self._own, self._make
        weighted = own.evidence * own.value + MAKE_WEIGHT * make.value
        return weighted / (own.evidence + MAKE_WEIGHT)

    @property
    def tokens_per_s(self) -> float:
        """The same as a rate, and at least 1."""
        return 1 / min(1.0, self.token_s) if self.token_s else 1.0

    def measure(self, token_s: float, chunk_tokens: int) -> None:
        """A step with that chunk ended, and its group now expects `token_s`; small chunks tell
        little of it."""
        weight = min(1.0, chunk_tokens / PACE_CHUNK_TOKENS)
        self._own.add(token_s, weight)
        self._make.add(token_s, weight)

    def pass_by(self, groups_count: int) -> None:
        """The group was idle, and a request went to another one of so many groups."""
        self._own.fade(MISSED_TURN_MEMORY ** (1 / groups_count))

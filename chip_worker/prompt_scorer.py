"""Scores the prompt tokens that follow those a step computes.

row computes    a   a+1  ...  b-1
and scores     a+1  a+2  ...   b       no further than the last token of the prompt
"""

from collections.abc import Sequence

import torch

from chip_worker.batch import PromptScores
from chip_worker.model_runner import ModelRunner
from chip_worker.slots import PlannedRow
from chip_worker.token_scores import TokenScore, TokenScorer

PLACES_MAX = 64
"""Places whose logits exist at once: those of a whole chunk could outweigh the model."""


class PromptScorer:
    """Log-probabilities of the raw logits, on rank 0, which has them."""

    def __init__(self, runner: ModelRunner, scorer: TokenScorer) -> None:
        self._runner = runner
        self._scorer = scorer

    def score(self, hidden: torch.Tensor, rows: Sequence[PlannedRow]) -> tuple[PromptScores, ...]:
        """Scores of every row that has part in scoring, in row order.

        hidden: [T, H] of all rows, one after the other. Every rank must call it with the same rows,
        for each computes its part of the logits; only rank 0 gets them whole, and the others return
        an empty tuple.
        """
        places, token_ids, tops_counts = _collect(rows)
        scores: list[TokenScore] = []
        for start in range(0, len(places), PLACES_MAX):
            part = slice(start, start + PLACES_MAX)
            logits = self._runner.logits(hidden, places[part])
            if logits is not None:
                scores += self._scorer.score(logits, token_ids[part], tops_counts[part])
        if len(scores) < len(places):
            return ()
        return _divide(scores, rows)


def _collect(rows: Sequence[PlannedRow]) -> tuple[list[int], list[int], list[int]]:
    """Of every scored token: its place among the step's tokens, its id, its number of tops."""
    places: list[int] = []
    token_ids: list[int] = []
    tops_counts: list[int] = []
    first_place = 0
    for row in rows:
        scored = row.scored
        if scored is not None:
            places += range(first_place, first_place + len(scored))
            token_ids += row.slot.tokens[scored.start : scored.stop].tolist()
            tops_counts += [row.slot.wants.prompt_top_tokens or 0] * len(scored)
        first_place += row.stop - row.start
    return places, token_ids, tops_counts


def _divide(scores: Sequence[TokenScore], rows: Sequence[PlannedRow]) -> tuple[PromptScores, ...]:
    found: list[PromptScores] = []
    first = 0
    for row in rows:
        if row.scored is None:
            continue
        own = scores[first : first + len(row.scored)]
        first += len(own)
        tops = tuple(score.tops for score in own if score.tops is not None)
        found.append(PromptScores(tuple(score.logprob for score in own), tops))
    return tuple(found)

"""Log-probabilities of given tokens and of the likeliest ones at their places, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.interface import KernelTable
from chip_worker.batch import TopTokens
from chip_worker.step_memory import StepMemory

LOGPROBS_OPERATION = "token_logprobs"


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token's log-probability; tops: the likeliest at its place, None if none are listed."""

    logprob: float
    tops: TopTokens | None


class TokenScorer:
    """Scores tokens by the logits as the model gave them: nothing a request asks changes them."""

    def __init__(self, kernels: KernelTable, memory: StepMemory) -> None:
        self._token_logprobs = kernels.function(LOGPROBS_OPERATION)
        self._memory = memory

    def score(
        self, logits: torch.Tensor, token_ids: Sequence[int], tops_counts: Sequence[int]
    ) -> list[TokenScore]:
        """logits: [R, V] float32 on the chip; of each row one token and its own number of tops."""
        tops_count = min(max(tops_counts), logits.shape[1])
        ids = self._memory.place(LOGPROBS_OPERATION, torch.tensor(token_ids, dtype=torch.int64))
        found = self._token_logprobs(logits, ids, tops_count)
        to_host = self._memory.device.to_host
        logprobs, top_logprobs, top_ids = (to_host(part).tolist() for part in found)
        return [
            TokenScore(
                logprobs[row],
                TopTokens(tuple(top_ids[row][:count]), tuple(top_logprobs[row][:count]))
                if count
                else None,
            )
            for row, count in enumerate(tops_counts)
        ]

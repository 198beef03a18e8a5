"""Log-probabilities of a whole text by a group, its blocks dropped behind windows as they fall."""

import torch

from chip_worker.batch import RowWants, StepRow
from tests.fakes.compute_group import BLOCK_TOKENS, ComputeGroup, admission


def sequence_logprobs(
    group: ComputeGroup, ids: list[int], vocabulary: int, chunk: int
) -> torch.Tensor:
    """[T - 1, V]: of the token that follows each but the last; prefill in chunks."""
    windows = group.ranks[0].session.kv_windows
    blocks = -(-len(ids) // BLOCK_TOKENS)
    first: dict[str, object] = {
        "admissions": (admission(ids, wants=RowWants(prompt_top_tokens=vocabulary)),),
        "new_blocks": tuple(
            (0, kv_group, kv_group * blocks + block)
            for kv_group in range(len(windows))
            for block in range(blocks)
        ),
    }
    dropped = [0] * len(windows)
    found = torch.full((len(ids) - 1, vocabulary), float("nan"))
    for start in range(0, len(ids), chunk):
        behind = [max(0, start - w + 1) // BLOCK_TOKENS if w else 0 for w in windows]
        drops = tuple(
            (0, kv_group, count - dropped[kv_group])
            for kv_group, count in enumerate(behind)
            if count > dropped[kv_group]
        )
        dropped = behind
        tokens = min(chunk, len(ids) - start)
        rows = (StepRow(0, tokens, start + tokens == len(ids)),)
        (scores,) = group.result(**first, drops=drops, rows=rows).prompt_scores or ((),)
        for place, tops in enumerate(scores.tops if scores else (), start):
            found[place, list(tops.token_ids)] = torch.tensor(tops.logprobs)
        first = {}
    return found

"""What the logits processors of transformers make of logits: a program for a process of its own.

Usage: transformers_logits.py CASES RESULTS, both .npz. transformers imports a package `kernels` if
there is one; ours must not be found, so the repository is taken from the search path first.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def hide_repository() -> None:
    """Neither the search path nor the finder of an editable installation leads to it."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != REPOSITORY]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]


hide_repository()

import numpy as np  # noqa: E402 - after the repository is hidden
import torch  # noqa: E402
from transformers import (  # noqa: E402
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


def filtered(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """[1, V] through the warpers, in the order in which generation has them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(torch.zeros((1, 0), dtype=torch.int64), logits)


def adjusted(
    logits: torch.Tensor,
    ids: list[int],
    prompt_count: int,
    penalty: float,
    biases: dict[int, float],
    suppressed: list[int],
    min_tokens: int,
) -> torch.Tensor:
    """[1, V] with bias, repetition penalty and suppression of ends, for `ids` known so far."""
    processors = LogitsProcessorList()
    if biases:
        processors.append(
            SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in biases.items()})
        )
    processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    processors.append(
        MinNewTokensLengthLogitsProcessor(prompt_count, min_tokens, suppressed, device="cpu")
    )
    return processors(torch.tensor([ids]), logits)


def main(cases_path: str, results_path: str) -> None:
    cases = np.load(cases_path)
    filters = zip(
        *(cases[name] for name in ("temperature", "top_k", "top_p", "min_p")), strict=True
    )
    kept = [
        filtered(torch.from_numpy(row)[None].clone(), float(t), int(k), float(p), float(m))
        for row, (t, k, p, m) in zip(cases["logits"], filters, strict=True)
    ]
    changed = [
        adjusted(
            torch.from_numpy(row)[None].clone(),
            ids.tolist(),
            int(cases["prompt_count"]),
            float(penalty),
            dict(zip(cases["bias_ids"].tolist(), cases["biases"].tolist(), strict=True)),
            cases["suppressed"].tolist(),
            int(min_tokens),
        )
        for row, ids, penalty, min_tokens in zip(
            cases["logits"], cases["ids"], cases["penalty"], cases["min_tokens"], strict=True
        )
    ]
    np.savez(results_path, filtered=torch.cat(kept).numpy(), adjusted=torch.cat(changed).numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Tells near ties from faults: would rounding alone have drawn the other token?"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernels import sampling_reference
from tests.fakes.dense_llama import dense_logits
from tests.fakes.field_models import FieldModel

NOISE = 2e-5
"""Float32 logits of this model are nearer than that to exact ones, whatever the batch."""
TRIES = 512


def is_near_tie(
    model: FieldModel,
    sampling: Mapping[str, Any],
    choice: int,
    known: tuple[Sequence[int], Sequence[int]],
    drawn: set[int],
) -> bool:
    """Whether logits that differ by NOISE at most draw each of these tokens.

    known: ids of the prompt, and of the output so far. sampling: by gRPC's names.
    """
    prompt, output = known
    ids = [*prompt, *output]
    exact = dense_logits(model.shape, model.tensors(), ids)[-1, : model.vocabulary_size]
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(TRIES, len(exact), generator=generator, dtype=torch.float64) * 2 - 1
    logits = (exact + NOISE * noise).float()
    adjusted = adjust(model, sampling, logits, prompt, output)
    real = torch.float32
    found, _ = sampling_reference.sample(
        adjusted,
        rows(sampling.get("temperature", 1.0), real),
        rows(signed(sampling.get("seed", 0)), torch.int64),
        rows(choice, torch.int64),
        rows(len(output), torch.int64),
        rows(sampling.get("top_k", 0), torch.int64),
        rows(sampling.get("top_p", 1.0), real),
        rows(sampling.get("min_p", 0.0), real),
    )
    return drawn <= set(found.tolist())


def adjust(
    model: FieldModel,
    sampling: Mapping[str, Any],
    logits: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
) -> torch.Tensor:
    """Bias, penalties and suppression, for every token of every try."""
    tries, vocabulary = logits.shape
    seen = torch.bincount(torch.tensor([*prompt, *output]), minlength=vocabulary) > 0
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocabulary)
    bias = torch.zeros(vocabulary)
    for token_id, value in sampling.get("logit_bias", {}).items():
        bias[token_id] = value
    if len(output) < sampling.get("min_tokens", 0):
        ends = [*sampling.get("stop_token_ids", ())]
        ends += [] if sampling.get("ignore_eos") else model.end_ids
        bias[ends] = float("-inf")
    repetition = torch.where(seen, float(sampling.get("repetition_penalty", 1.0)), 1.0)
    return sampling_reference.adjust_logits(
        logits,
        torch.arange(tries).repeat_interleave(vocabulary),
        torch.arange(vocabulary).repeat(tries),
        bias.repeat(tries),
        counts.repeat(tries),
        torch.full((tries * vocabulary,), float(sampling.get("presence_penalty", 0.0))),
        torch.full((tries * vocabulary,), float(sampling.get("frequency_penalty", 0.0))),
        repetition.repeat(tries),
    )


def rows(value: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((TRIES,), value, dtype=dtype)


def signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed

"""How fast a layout may be, from a calibration: as measured, extrapolated, or not known.

A group larger than the one measured takes a smaller part of the work to each chip. Each term of the
step-time model is scaled by what its work is of, on the chip that has the most of it:

    per token of a chunk, per row that decodes   bytes of weights
    per token a chunk attends to                 query heads: scores are computed for each
    per token a decode row attends to            key/value heads: their bytes are read
    fixed time of a step                         kept whole, though part of it reads weights

Not in it: the sums between chips, which the larger group has to wait for. Nothing is extrapolated
for chips that share a memory: how fast each reads depends on what the others read.
"""

from dataclasses import dataclass, replace

from control_plane.scheduling.step_time import StepWork, context_of_chunk
from scripts.calibration.calibration_file import Calibration, StepTime
from scripts.planning.capacity import Capacity, Wishes
from scripts.planning.needs import Chips, GroupNeeds, ModelNeeds

DIGEST_CHARACTERS = 12
"""Of a model's digest, as people are shown it: enough to tell models apart."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one group, in seconds and tokens per second.

    rows: requests that decode in a step, each in the middle of its context. prefill: of a prompt
    alone, its first chunk. extrapolated: to another group size; beyond: to more rows or longer
    contexts than were measured. total_decode_tokens_per_s: of all groups; None where they share a
    memory, which was measured with one.
    """

    rows: int
    decode_step_s: float
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    extrapolated: bool
    beyond: bool
    total_decode_tokens_per_s: float | None


def why_useless(calibration: Calibration, model: ModelNeeds, chips: Chips) -> str | None:
    """Why a calibration says nothing of these chips and this model, with the remedy, or None.

    Chips that are not at hand are taken to be such as were measured.
    """
    digests = [
        f"digest {each[:DIGEST_CHARACTERS]}" for each in (calibration.model_digest, model.digest)
    ]
    compared = [
        ("dtype", calibration.dtype, model.dtype, f"--dtype {model.dtype}"),
        # Before the digest, which depends on them: these people know by name.
        (
            "form of weights",
            _form(calibration.weights),
            _form(model.weights),
            f"--weights {model.weights}",
        ),
        (f"model ({calibration.model})", *digests, "--model"),
    ]
    if chips.at_hand:
        compared += [
            ("backend", calibration.backend, chips.backend, f"--backend {chips.backend}"),
            # What a chip has of its host depends on how many share it.
            ("chip", calibration.device, chips.description, f"--chips {chips.count}"),
        ]
    for name, measured, planned, option in compared:
        if measured != planned:
            return (
                f"it was measured with another {name}: {measured}; here it is {planned}: measure "
                f"that with `polychip calibrate {option}` and the other options given here"
            )
    return None


def _form(weights: str) -> str:
    return "bf16" if weights == "auto" else weights


def speed(
    calibration: Calibration, model: ModelNeeds, held: Capacity, chips: Chips, wishes: Wishes
) -> Speed | None:
    """Of a layout on chips and with a model as were measured; None where there is no ground.

    That is for layouts that hold no request, and for groups smaller than the one measured: what
    they save in sums between chips is not known, nor what reading all weights costs one chip.
    """
    rows = min(wishes.running_max, held.requests)
    measured = _measured_needs(calibration, model)
    if rows < 1 or measured is None or held.needs.size < measured.size:
        return None
    same = held.needs.size == measured.size
    if chips.shared and not same:
        return None
    times = calibration.step_time
    if not same:
        times = _scaled(times, measured, held.needs)
    decode = StepWork(0, 0, rows, rows * max(1, wishes.context_tokens // 2))
    tokens = min(wishes.chunk_tokens, wishes.context_tokens)
    chunk = StepWork(tokens, context_of_chunk(0, tokens), 0, 0)
    step_s, chunk_s = times.predict(decode), times.predict(chunk)
    if not (step_s > 0 and chunk_s > 0):
        return None
    alone = held.layout.groups == 1 or not chips.shared
    return Speed(
        rows=rows,
        decode_step_s=step_s,
        decode_tokens_per_s=rows / step_s,
        prefill_tokens_per_s=tokens / chunk_s,
        extrapolated=not same,
        beyond=_is_beyond(calibration, decode) or _is_beyond(calibration, chunk),
        total_decode_tokens_per_s=held.layout.groups * rows / step_s if alone else None,
    )


def _measured_needs(calibration: Calibration, model: ModelNeeds) -> GroupNeeds | None:
    """Of the group that was measured, under the default policy; None if its size is unknown."""
    groups = model.of_size(calibration.group_size)
    return groups[0] if groups else None


def _scaled(times: StepTime, measured: GroupNeeds, planned: GroupNeeds) -> StepTime:
    weights = planned.weight_bytes / measured.weight_bytes
    query_heads = _most(planned, "query_heads") / _most(measured, "query_heads")
    kv_heads = _most(planned, "kv_heads") / _most(measured, "kv_heads")
    return replace(
        times,
        chunk_token_s=times.chunk_token_s * weights,
        decode_row_s=times.decode_row_s * weights,
        chunk_context_s=times.chunk_context_s * query_heads,
        decode_context_s=times.decode_context_s * kv_heads,
    )


def _most(needs: GroupNeeds, heads: str) -> int:
    return max(int(getattr(rank, heads)) for rank in needs.ranks)


def _is_beyond(calibration: Calibration, work: StepWork) -> bool:
    """Whether any part of the work is more than in every step that was measured."""
    measured = zip(*(point.work for point in calibration.points), strict=True)
    most = [max(each) for each in measured] or [0] * len(work)
    return any(asked > found for asked, found in zip(work, most, strict=True))

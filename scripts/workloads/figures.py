"""What is counted of a workload's answers; docs/performance.md defines each figure."""

from collections.abc import Sequence

from scripts.workloads.streaming import Answer
from scripts.workloads.workload import Outcome

Figures = dict[str, float | None]
"""By name, with the unit last. None: the server does not tell, or there was nothing to count."""

LABELS = {
    "decode_tokens_per_s": "decode tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "inter_token_p50_ms": "inter-token p50 ms",
    "inter_token_p99_ms": "inter-token p99 ms",
    "cached_tokens": "cached tokens",
    "stall_max_ms": "worst stall ms",
    "long_ttft_ms": "long TTFT ms",
}
"""The figures people are shown, and how they are called there."""
_OF_A_BATCH = (
    "output_tokens_per_s",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "inter_token_p50_ms",
    "inter_token_p99_ms",
    "cached_tokens",
)
SHOWN = {
    "W1": ("decode_tokens_per_s", "ttft_p50_ms"),
    "W2": _OF_A_BATCH,
    "W3": _OF_A_BATCH,
    "W4": ("stall_max_ms", "long_ttft_ms"),
}
"""Which of them belong to each workload."""


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """The value whose place among the sorted ones is nearest to the fraction of the way."""
    if not values:
        return None
    return sorted(values)[round(fraction * (len(values) - 1))]


def figures_of(outcome: Outcome) -> Figures:
    """Of one workload, raw: nothing is rounded."""
    answers = outcome.answers
    gaps_s = [later - earlier for answer in answers for earlier, later in answer.gaps]
    ttfts_s = [answer.ttft_s for answer in answers]
    output_tokens = sum(answer.tokens_count for answer in answers)
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in answers)
    decoded_tokens = sum(answer.tokens_count - 1 for answer in answers)
    cached = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    figures: Figures = {
        "duration_s": outcome.duration_s,
        "requests": len(answers),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": sum(cached) if cached else None,
        "chunks": sum(len(answer.times_s) for answer in answers),
        "decode_tokens_per_s": decoded_tokens / sum(gaps_s) if sum(gaps_s) else None,
        "output_tokens_per_s": output_tokens / outcome.duration_s,
        "total_tokens_per_s": (output_tokens + prompt_tokens) / outcome.duration_s,
        "ttft_p50_ms": _ms(percentile(ttfts_s, 0.5)),
        "ttft_p99_ms": _ms(percentile(ttfts_s, 0.99)),
        "inter_token_p50_ms": _ms(percentile(gaps_s, 0.5)),
        "inter_token_p99_ms": _ms(percentile(gaps_s, 0.99)),
        "inter_token_max_ms": _ms(max(gaps_s, default=None)),
    }
    return figures if outcome.long is None else figures | _around(answers, outcome.long)


def _around(answers: Sequence[Answer], long: Answer) -> Figures:
    """What the decoding ones saw while the long prompt was computed, and at other times."""
    first_token_s = long.sent_s + long.ttft_s
    during: list[float] = []
    otherwise: list[float] = []
    for answer in answers:
        for earlier, later in answer.gaps:
            overlaps = later > long.sent_s and earlier < first_token_s
            (during if overlaps else otherwise).append(later - earlier)
    return {
        "long_ttft_ms": _ms(long.ttft_s),
        "long_prompt_tokens": long.prompt_tokens,
        "stall_max_ms": _ms(max(during, default=None)),
        "inter_token_during_p50_ms": _ms(percentile(during, 0.5)),
        "inter_token_otherwise_p50_ms": _ms(percentile(otherwise, 0.5)),
        "chunks_during": len(during),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def doubts_about(outcome: Outcome) -> list[str]:
    """Why the figures may not be comparable: counts that are not what was asked for."""
    answers = [*outcome.answers, *([] if outcome.long is None else [outcome.long])]
    doubts = []
    wrong = [
        answer
        for answer in answers
        if answer.prompt_tokens not in (None, answer.expected_prompt_tokens)
    ]
    if wrong:
        differences = [
            (answer.prompt_tokens or 0) - answer.expected_prompt_tokens for answer in wrong
        ]
        doubts.append(
            f"the server counts other tokens in {len(wrong)} of {len(answers)} prompts: "
            f"{wrong[0].prompt_tokens} instead of {wrong[0].expected_prompt_tokens}, differences "
            f"{min(differences):+d} to {max(differences):+d}; name its tokenizer with --tokenizer"
        )
    short = [
        answer.completion_tokens
        for answer in answers
        if answer.completion_tokens is not None and answer.completion_tokens < answer.tokens_max
    ]
    if short:
        doubts.append(
            f"{len(short)} of {len(answers)} answers ended early, the shortest after {min(short)} "
            "tokens; the server does not heed ignore_eos"
        )
    uncounted = sum(answer.completion_tokens is None for answer in answers)
    if uncounted:
        doubts.append(
            f"the server counts no tokens in {uncounted} of {len(answers)} answers; their chunks "
            "were counted instead"
        )
    return doubts

"""The reference outputs: greedy float32 answers of SmolLM2-135M-Instruct, made by transformers."""

import json
from dataclasses import dataclass
from pathlib import Path

GOLDEN = json.loads((Path(__file__).parent / "smollm2-135m-fp32.json").read_text())


@dataclass(frozen=True)
class GoldenCase:
    """One prompt with its greedy output and the log-probability of each drawn token."""

    name: str
    prompt: str | None
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    chat: bool


def golden_cases() -> list[GoldenCase]:
    """Every case whose choices another order of summation cannot flip."""
    cases = []
    for kind in ("cases", "long_prompts"):
        for number, case in enumerate(GOLDEN[kind]):
            if case["min_margin"] < 0.001:
                continue
            logprobs = [
                dict(map(tuple, five))[token]
                for five, token in zip(case["top5_logprobs"], case["output_ids"], strict=True)
            ]
            cases.append(
                GoldenCase(
                    name=f"{kind}-{number}",
                    prompt=case.get("prompt"),
                    prompt_ids=tuple(case["prompt_ids"]),
                    output_ids=tuple(case["output_ids"]),
                    logprobs=tuple(logprobs),
                    chat=case["chat"],
                )
            )
    return cases

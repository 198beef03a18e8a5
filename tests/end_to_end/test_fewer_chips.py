"""A service comes up without a chip that fails or hangs, with an uneven split over the others.

The simulated chips fail where their fault script says: when they are opened, in the first sum of
their group, or when the model is loaded. A chip that hangs is bounded by the deadline of what it
hangs in.
"""

from pathlib import Path

import pytest

from tests.end_to_end.cluster import Clusters
from tests.end_to_end.generation import Client, request_of
from tests.end_to_end.test_golden import LOGPROB_TOLERANCE
from tests.fakes.field_models import Chain, FieldModel
from tests.golden.cases import golden_cases

BROKEN = "chip1"
GOLDEN_CASES = 3


def sim_options(chips: int, fault: str, *further: str) -> tuple[str, ...]:
    return (
        *("--backend", "sim", "--groups", str(chips), "--dtype", "float32"),
        *("--backend-option", f"faults={BROKEN}:{fault}", "--backend-option", "pace=off"),
        *further,
    )


def check_left_out(client: Client, chips: int) -> None:
    """All but the broken chip serve."""
    (group,) = client.status().groups
    expected = [f"chip{index}" for index in range(chips) if f"chip{index}" != BROKEN]
    assert list(group.ranks) == expected


@pytest.mark.end_to_end
def test_three_chips_of_which_one_fails_in_the_group(clusters: Clusters, tmp_path: Path) -> None:
    model = FieldModel(Chain())
    model.write(tmp_path / "model")
    further = ("--model", str(tmp_path / "model"), "--kv-blocks", "64", "--chunk-tokens", "32")
    options = sim_options(3, "fail@probe_collective", *further)
    client = clusters.client(*options)
    check_left_out(client, 3)
    said = clusters.cluster(*options).output()
    assert said.count("chip1 is unavailable: chip 1 fails at probe_collective") == 1
    assert clusters.cluster(*options).logged("group.fewer_chips")
    prompt = model.tokenizer.encode("the quick brown fox")
    answer = client.generate(request_of(prompt, 16))
    assert isinstance(model.weights, Chain)
    assert answer.ids == model.weights.answer(model.tokenizer, prompt[-1], 16)
    clusters.close()


@pytest.mark.end_to_end
@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        *("fail@open", "fail@probe_collective", "fail@load", "death@load"),
        *("hang@open", "hang@probe_collective", "hang@load"),
    ],
)
def test_seven_of_eight_chips_answer_golden(clusters: Clusters, fault: str) -> None:
    # Seven ranks on a few cores take long for a step; all else has its default deadline.
    deadlines = ("--step-deadline", "60")
    client = clusters.client(*sim_options(8, fault, *deadlines))
    check_left_out(client, 8)
    # Seven ranks on a few cores are slow: those that take the fewest steps.
    cases = sorted(golden_cases(), key=lambda case: len(case.prompt_ids) + len(case.output_ids))
    for case in cases[:GOLDEN_CASES]:
        answer = client.generate(request_of(case.prompt_ids, len(case.output_ids)))
        assert tuple(answer.ids) == case.output_ids, case.name
        pairs = zip(answer.logprobs, case.logprobs, strict=True)
        assert max(abs(ours - theirs) for ours, theirs in pairs) < LOGPROB_TOLERANCE, case.name
    clusters.close()

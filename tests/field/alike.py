"""Checks that two protocols gave one request the same outcome."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest

from tests.fakes.field_tokenizers import FieldTokenizer
from tests.field.exchange import Outcome, Said, Scores
from tests.field.field_cluster import LOGPROB_TOLERANCE, FieldCluster
from tests.field.near_ties import is_near_tie
from tests.field.neutral_request import NeutralRequest, Prompt


def check_alike(
    field: FieldCluster,
    request: NeutralRequest,
    http: Outcome,
    calls: Sequence[Outcome],
) -> None:
    """calls: over gRPC, one for each prompt."""
    refusals = [each.refused for each in calls if each.refused is not None]
    if http.refused is not None or refusals:
        check_refusals(request, http, calls)
        return
    assert not request.wrong, f"{set(request.wrong)} should have been refused"
    said = [(index, choice) for index, call in enumerate(calls) for choice in call.choices]
    assert len(http.choices) == len(said) == len(request.prompts) * request.choices_count
    tied = False
    for index, (whole, (prompt_index, other)) in enumerate(zip(http.choices, said, strict=True)):
        prompt_ids = calls[prompt_index].prompt_ids
        echo = echoed(field.tokenizer, request, prompt_ids, prompt_index)
        assert whole.text.startswith(echo), f"{whole.text!r} has no {echo!r}"
        whole.text = whole.text.removeprefix(echo)
        choice = index % request.choices_count
        tied |= check_choices(field, request, choice, prompt_ids, (whole, other))
    check_usage(request, http, calls, tied=tied)


def check_refusals(request: NeutralRequest, http: Outcome, calls: Sequence[Outcome]) -> None:
    """Over HTTP one of the refusals that the prompts get over gRPC; the fault is named."""
    expected = {
        (each.refused.code, each.refused.reason, each.refused.parameter)
        for each in calls
        if each.refused is not None
    }
    refused = http.refused
    assert refused is not None, f"gRPC refused with {expected}, HTTP did not"
    own_names = {"max_completion_tokens": "max_tokens"}
    if not request.is_chat:
        own_names["logprobs"] = "top_logprobs"
    name = own_names.get(str(refused.parameter), refused.parameter)
    assert (refused.code, refused.reason, name) in expected, f"HTTP: {refused}, gRPC: {expected}"
    assert name in request.wrong, f"refused although it is fine: {refused}"


def check_choices(
    field: FieldCluster,
    request: NeutralRequest,
    choice: int,
    prompt_ids: Sequence[int],
    both: tuple[Said, Said],
) -> bool:
    """The same text, ids, ends and scores; True if they parted at a near tie, where both may."""
    whole, other = both
    check_scores(whole.prompt_logprobs, other.prompt_logprobs)
    check_tops(whole.prompt_tops, other.prompt_tops)
    assert other.ids is not None
    if whole.ids is not None and parted(field, request, choice, prompt_ids, (whole.ids, other.ids)):
        return True
    assert (whole.text, whole.finish) == (other.text, other.finish)
    check_scores(whole.logprobs, other.logprobs)
    check_tops(whole.tops, other.tops)
    return False


def parted(
    field: FieldCluster,
    request: NeutralRequest,
    choice: int,
    prompt_ids: Sequence[int],
    both: tuple[list[int], list[int]],
) -> bool:
    """Whether the ids go apart at a near tie; fails if they do anywhere else."""
    ids, others = both
    if ids == others:
        return False
    shared = next(i for i, (a, b) in enumerate(zip_longest(ids, others)) if a != b)
    apart = {each[shared] for each in both if shared < len(each)}
    assert len(apart) == 2, f"one ended early: {ids} and {others}"
    known = (prompt_ids, others[:shared])
    tie = is_near_tie(field.spec.model, request.fields, choice, known, apart)
    assert tie, f"{ids} and {others}"
    return True


def check_usage(
    request: NeutralRequest, http: Outcome, calls: Sequence[Outcome], *, tied: bool
) -> None:
    """Counts add up; the seed is the one that was sent."""
    usages = [call.usage for call in calls]
    assert None not in usages, "a gRPC call ended without usage"
    columns: list[Any] = [list(column) for column in zip(*usages, strict=True)]  # type: ignore[arg-type]
    seed = request.fields.get("seed")
    if seed is not None:
        assert set(columns[2]) == {seed}
    if http.usage is None:
        return
    assert http.usage[0] == sum(columns[0])
    assert tied or http.usage[1] == sum(columns[1])
    assert seed is None or http.usage[2] == seed


def check_scores(scores: Scores, others: Scores) -> None:
    assert [each is None for each in scores] == [each is None for each in others]
    numbers = [each for each in scores if each is not None]
    assert numbers == pytest.approx(
        [each for each in others if each is not None], abs=LOGPROB_TOLERANCE
    )


def check_tops(tops: list[list[float]], others: list[list[float]]) -> None:
    assert list(map(len, tops)) == list(map(len, others))
    for listed, expected in zip(tops, others, strict=True):
        assert listed == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def echoed(
    tokenizer: FieldTokenizer, request: NeutralRequest, ids: Sequence[int], index: int
) -> str:
    """What HTTP puts before the answer."""
    prompt: Prompt = request.prompts[index]
    if not request.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(tokenizer.text_bytes, ids)).decode(errors="replace")

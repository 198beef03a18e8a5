"""Scores of prompts through the core: each place once and in order, whatever happens meanwhile."""

import math
from dataclasses import replace

import pytest

from control_plane.config import SchedulingConfig
from control_plane.errors import WorkerFailure
from control_plane.scheduling.messages import (
    Cancel,
    End,
    Failed,
    LossKind,
    PromptScores,
    RowResult,
    Tokens,
    TopTokens,
    WorkerFaulted,
)
from tests.fakes.driven_core import DrivenCore, reference
from tests.fakes.fake_chip import likeliest, token_score

PROMPT = tuple(range(100, 121))


def driven(blocks: int = 64, **changes) -> DrivenCore:
    values = {"block_tokens": 4, "chunk_tokens": 8, "running_max": 4, "digest_interval_steps": 1}
    return DrivenCore(SchedulingConfig(**(values | changes)), blocks).serve()


def submit_scored(core: DrivenCore, name: str, prompt=PROMPT, tops: int = 0, **changes) -> None:
    scored = {"prompt_top_tokens": tops, "use_prefix_cache": False}
    core.submit(name, prompt, **(scored | {"max_tokens": 4} | changes))


def scores_of(prompt) -> list[float]:
    return [token_score(prompt[: i + 1]) for i in range(1, len(prompt))]


@pytest.mark.parametrize("prompt_count", [1, 2, 7, 8, 9, 16, 17, 21])
@pytest.mark.parametrize("admission_tokens_max", [1, 5, 8, 16384])
def test_every_place_but_the_first_has_its_score(prompt_count, admission_tokens_max) -> None:
    """Chunks and admissions in parts: a token is computed only when the next one is known."""
    core = driven(admission_tokens_max=admission_tokens_max)
    prompt = PROMPT[:prompt_count]
    submit_scored(core, "a", prompt)
    core.finish_all()
    assert core.scores.get("a", []) == scores_of(prompt)
    assert core.outputs["a"] == reference(prompt, 4)


def test_the_last_scores_come_with_the_first_token() -> None:
    core = driven()
    submit_scored(core, "a")
    brought = [e for _ in range(3) for e in core.finish_step() if isinstance(e, Tokens)]
    spans = [(d.first_index, len(d.scores.logprobs)) for t in brought for d in t.prompt_deltas]
    assert spans == [(1, 8), (9, 8), (17, 4)]
    assert [len(tokens.deltas) for tokens in brought] == [0, 0, 1]


def test_the_likeliest_tokens_are_listed_where_they_are_asked_for() -> None:
    core = driven()
    submit_scored(core, "a", tops=2, top_tokens=3, wants_logprobs=True)
    submit_scored(core, "b", PROMPT[3:])
    core.finish_all()
    brought = [e for e in core.effects if isinstance(e, Tokens)]
    tops = {"a": [], "b": []}
    for delta in (d for tokens in brought for d in tokens.prompt_deltas):
        tops[delta.request_id] += delta.scores.tops
    assert tops["a"] == [likeliest(PROMPT[:i], 2) for i in range(1, len(PROMPT))]
    assert tops["b"] == []
    drawn = {"a": [], "b": []}
    for delta in (d for tokens in brought for d in tokens.deltas):
        drawn[delta.request_id].append(
            (len(delta.logprobs), [len(t.token_ids) for t in delta.tops])
        )
    assert drawn == {"a": [(1, [3])] * 4, "b": [(0, [])] * 4}


def test_a_warm_cache_changes_nothing() -> None:
    core = driven()
    core.submit("warm", PROMPT, max_tokens=2)
    core.finish_all()
    submit_scored(core, "a")
    assert core.plans[-1].admissions[0].cached_count == 0
    core.finish_all()
    assert core.scores["a"] == scores_of(PROMPT)


def test_decode_rows_have_no_part_in_it() -> None:
    core = driven(chunk_tokens=64)
    submit_scored(core, "a", max_tokens=8)
    core.finish_step()
    assert core.scores["a"] == scores_of(PROMPT)
    core.submit("b", PROMPT, max_tokens=2)
    core.finish_all()
    assert core.outputs["a"] == reference(PROMPT, 8)
    assert "b" not in core.scores


@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 5])
def test_a_lost_group_repeats_no_score(steps_before) -> None:
    core = driven()
    submit_scored(core, "a", max_tokens=8)
    for _ in range(steps_before):
        core.finish_step()
    epoch = core.plans[-1].epoch
    effects = core.handle(WorkerFaulted("chip0", 1, epoch, LossKind.PEER, "lost"))
    core.make_ready_all(effects)
    replayed = next(p.admissions for p in core.plans if p.epoch != epoch and p.admissions)
    assert (replayed[0].prompt_top_tokens is None) == (steps_before >= 3), "only what is missing"
    core.finish_all()
    assert core.scores["a"] == scores_of(PROMPT)
    assert core.outputs["a"] == reference(PROMPT, 8)


def test_a_retracted_request_goes_on_without_its_scores_again() -> None:
    core = driven(blocks=24, running_max=8, chunk_tokens=32)
    for i in range(6):
        submit_scored(core, f"r{i}", [i, 1, 2, 3, 4, 5], max_tokens=40, tops=i % 2)
    core.finish_all()
    assert core.core.snapshot(core.now).groups[0].retracted > 0
    for i in range(6):
        assert core.scores[f"r{i}"] == scores_of([i, 1, 2, 3, 4, 5])
        assert core.outputs[f"r{i}"] == reference([i, 1, 2, 3, 4, 5], 40)


def test_a_resumed_request_is_scored_up_to_its_prompt() -> None:
    core = driven()
    known = reference(PROMPT, 6)
    core.outputs["a"] = known[:5]
    submit_scored(core, "a", max_tokens=6, output_ids=tuple(known[:5]))
    core.finish_all()
    assert core.scores["a"] == scores_of(PROMPT)
    assert core.outputs["a"] == known


def test_scores_of_a_request_that_is_over_are_dropped() -> None:
    core = driven()
    submit_scored(core, "gone")
    submit_scored(core, "stays", PROMPT[2:])
    core.finish_step()
    core.handle(Cancel("gone"))
    before = list(core.scores["gone"])
    core.finish_all()
    assert core.scores["gone"] == before
    assert core.scores["stays"] == scores_of(PROMPT[2:])


def test_a_prompt_that_is_only_scored_ends_with_no_output() -> None:
    core = driven()
    submit_scored(core, "a", max_tokens=1)
    while len(core.scores.get("a", [])) < len(PROMPT) - 1:
        core.finish_step()
    core.handle(End("a", 0))
    core.finish_all()
    assert not core.core._requests
    assert core.core.snapshot(core.now).groups[0].blocks.free == 64


def test_a_score_that_is_no_number_fails_its_request_only() -> None:
    core = driven()
    submit_scored(core, "bad")
    submit_scored(core, "good", PROMPT[1:])

    def spoil(done):
        first = PromptScores((math.nan,) * len(done.prompt_scores[0].logprobs))
        return replace(done, prompt_scores=(first, *done.prompt_scores[1:]))

    effects = core.finish_step(change=spoil)
    failed = [effect for effect in effects if isinstance(effect, Failed)]
    assert [effect.request_id for effect in failed] == ["bad"]
    assert isinstance(failed[0].error, WorkerFailure)
    core.finish_all()
    assert "bad" not in core.scores
    assert core.scores["good"] == scores_of(PROMPT[1:])


def test_minus_infinity_is_a_score() -> None:
    core = driven(chunk_tokens=64)
    submit_scored(core, "a")

    def unlikely(done):
        scores = PromptScores((-math.inf,) * (len(PROMPT) - 1))
        return replace(done, prompt_scores=(scores,))

    core.finish_step(change=unlikely)
    assert core.scores["a"] == [-math.inf] * (len(PROMPT) - 1)


TOP = TopTokens((1,), (-0.5,))

ANOMALIES = {
    "a score too few": lambda done: replace(done, prompt_scores=(PromptScores((-1.0,) * 7, ()),)),
    "a score too many": lambda done: replace(done, prompt_scores=(PromptScores((-1.0,) * 9, ()),)),
    "no scores": lambda done: replace(done, prompt_scores=()),
    "scores of another row": lambda done: replace(done, prompt_scores=done.prompt_scores * 2),
    "tops not asked for": lambda done: replace(
        done, prompt_scores=(replace(done.prompt_scores[0], tops=(TOP,) * 8),)
    ),
    "a token nobody drew": lambda done: replace(done, results=(RowResult((1,)),)),
}


@pytest.mark.parametrize("name", ANOMALIES)
def test_scores_that_do_not_fit_end_the_epoch(name) -> None:
    core = driven()
    submit_scored(core, "a")
    epoch = core.plans[-1].epoch
    effects = core.finish_step(change=ANOMALIES[name])
    core.make_ready_all(effects)
    core.finish_all()
    assert core.plans[-1].epoch > epoch
    assert core.scores["a"] == scores_of(PROMPT)


@pytest.mark.parametrize(
    "result",
    [
        RowResult((1,), ()),
        RowResult((1,), (-0.5, -0.5), (likeliest(PROMPT, 2),)),
        RowResult((1, 2), (-0.5, -0.5), (likeliest(PROMPT, 2),) * 2),
        RowResult((1,), (-0.5,), ()),
        RowResult((1,), (-0.5,), (likeliest(PROMPT, 3),)),
        RowResult((1,), (-0.5,), (TopTokens((1, 2), (-0.5,)),)),
        RowResult((1,), (-0.5,), (TopTokens((), ()),)),
        RowResult((1,), (-0.5,), (TOP,) * 2),
    ],
)
def test_a_row_that_does_not_tell_what_was_asked_ends_the_epoch(result) -> None:
    core = driven(chunk_tokens=64)
    core.submit("a", PROMPT, max_tokens=2, wants_logprobs=True, top_tokens=2)
    epoch = core.plans[-1].epoch
    effects = core.finish_step(change=lambda done: replace(done, results=(result,)))
    assert "a" not in core.outputs
    core.make_ready_all(effects)
    assert core.plans[-1].epoch > epoch


def test_a_small_vocabulary_lists_fewer() -> None:
    core = driven(chunk_tokens=64)
    core.submit("a", PROMPT, max_tokens=2, top_tokens=5)
    result = RowResult((1,), (), (TOP,))
    core.finish_step(change=lambda done: replace(done, results=(result,)))
    assert core.outputs["a"] == [1]


def test_the_time_in_the_queue_is_until_the_first_slot() -> None:
    core = driven(running_max=1)
    core.submit("a", range(4), max_tokens=3)
    core.now += 1.0
    core.submit("b", range(4, 8), max_tokens=3)
    while "b" not in core.outputs:
        core.finish_step()
        core._end_complete()
    epoch = core.plans[-1].epoch
    forming = core.handle(WorkerFaulted("chip0", 1, epoch, LossKind.PEER, "lost"))
    core.now += 1.0
    core.make_ready_all(forming)
    core.finish_all()
    facts = {"a": set(), "b": set()}
    for delta in (d for e in core.effects if isinstance(e, Tokens) for d in e.deltas):
        facts[delta.request_id].add(delta.facts.queue_s)
    assert facts["a"] == {0}
    (waited_s,) = facts["b"]
    assert 0.02 < waited_s < 0.1

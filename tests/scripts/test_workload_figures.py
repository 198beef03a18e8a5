"""How the figures of a workload are counted, and which doubts are raised about them."""

import pytest

from scripts.workloads.figures import doubts_about, figures_of, percentile
from scripts.workloads.streaming import Answer
from scripts.workloads.workload import Outcome


def answer(sent_s, *times_s, prompt=10, expected=10, counted=None, asked=None, cached=None):
    asked = len(times_s) if asked is None else asked
    return Answer(sent_s, times_s, expected, asked, prompt, counted, cached)


@pytest.mark.parametrize(
    ("count", "fraction", "value"),
    [(1, 0.99, 1), (2, 0.5, 1), (3, 0.5, 2), (4, 0.5, 3), (64, 0.5, 33), (64, 0.99, 63), (8, 1, 8)],
)
def test_a_percentile_is_the_value_at_the_nearest_place(count, fraction, value):
    assert percentile([*range(count, 0, -1)], fraction) == value


def test_no_values_have_no_percentile():
    assert percentile([], 0.5) is None


def test_figures_of_a_batch():
    # The second answer is 4 tokens in 3 chunks: tokens are counted, gaps are between chunks.
    answers = [
        answer(0.0, 0.5, 0.6, 0.8, counted=3, cached=4),
        answer(1.0, 1.25, 1.35, 1.65, counted=4, cached=None),
    ]
    figures = figures_of(Outcome(answers, 2.0))
    assert figures == {
        "duration_s": 2.0,
        "requests": 2,
        "prompt_tokens": 20,
        "output_tokens": 7,
        "cached_tokens": 4,
        "chunks": 6,
        "decode_tokens_per_s": pytest.approx(5 / 0.7),
        "output_tokens_per_s": 3.5,
        "total_tokens_per_s": 13.5,
        "ttft_p50_ms": pytest.approx(250),
        "ttft_p99_ms": pytest.approx(500),
        "inter_token_p50_ms": pytest.approx(200),
        "inter_token_p99_ms": pytest.approx(300),
        "inter_token_max_ms": pytest.approx(300),
    }


def test_what_a_server_does_not_tell_is_no_zero():
    figures = figures_of(Outcome([answer(0.0, 1.0, prompt=None)], 1.0))
    assert figures["cached_tokens"] is None
    assert figures["decode_tokens_per_s"] is None
    assert figures["inter_token_p50_ms"] is None
    assert figures["output_tokens"] == 1


def test_the_worst_stall_is_a_gap_that_overlaps_the_long_prompt():
    # The long prompt is computed from 2.0 to 4.0; a longer gap lies before it.
    answers = [answer(0.0, 0.1, 1.9, 2.5, 3.9, 4.1), answer(0.0, 1.0, 2.0, 4.0, 4.5)]
    long = answer(2.0, 4.0, 4.1, prompt=3500)
    figures = figures_of(Outcome(answers, 5.0, long))
    assert figures["stall_max_ms"] == pytest.approx(2000)
    assert figures["long_ttft_ms"] == pytest.approx(2000)
    assert figures["long_prompt_tokens"] == 3500
    assert figures["chunks_during"] == 4
    assert figures["inter_token_otherwise_p50_ms"] == pytest.approx(1000)
    assert figures["requests"] == 2
    assert figures["prompt_tokens"] == 20


def test_no_doubts_where_all_counts_are_as_asked():
    outcome = Outcome([answer(0, 1, 2, counted=2)], 1.0, answer(0, 1, counted=1))
    assert doubts_about(outcome) == []


def test_other_counts_of_a_prompt_are_doubted_with_numbers():
    answers = [answer(0, 1, counted=1), answer(0, 1, counted=1, prompt=12)]
    long = answer(0, 1, counted=1, prompt=9)
    (doubt,) = doubts_about(Outcome(answers, 1.0, long))
    assert "2 of 3 prompts: 12 instead of 10, differences -1 to +2" in doubt
    assert "--tokenizer" in doubt


def test_answers_that_end_early_are_doubted():
    answers = [answer(0, 1, 2, counted=2, asked=8), answer(0, 1, counted=8, asked=8)]
    (doubt,) = doubts_about(Outcome(answers, 1.0))
    assert "1 of 2 answers ended early, the shortest after 2 tokens" in doubt


def test_counting_chunks_for_tokens_is_doubted():
    (doubt,) = doubts_about(Outcome([answer(0, 1, 2, asked=8)], 1.0))
    assert "counts no tokens in 1 of 1 answers" in doubt

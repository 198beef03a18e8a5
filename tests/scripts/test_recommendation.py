"""What throughput curves recommend: the peak less 20 %, within memory, and said where unsure."""

from random import Random

import pytest

from scripts.calibration.recommendation import RISE_MIN, SHARE, Rate, recommend, smallest_good

CHUNKS = (64, 128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FLAT = tuple(Rate(size, 100.0) for size in BATCHES)


def curve(sizes, rate_of):
    return tuple(Rate(size, rate_of(size)) for size in sizes)


def saturating(fixed_s, token_s):
    """A step costs a fixed time and one for each token: a plateau at 1 / token_s."""
    return lambda size: size / (fixed_s + token_s * size)


def chosen(chunks, batches=FLAT, rows_held=None):
    found = recommend(chunks, batches, rows_held)
    return found.settings.chunk_tokens, found.settings.running_max, found.remarks


@pytest.mark.parametrize(("fixed", "expected"), [(0, 64), (64, 256), (300, 1024), (512, 1024)])
def test_on_a_plateau_the_smallest_with_80_percent_is_taken(fixed, expected):
    rates = curve(CHUNKS, saturating(fixed, 1.0))
    best = rates[-1].tokens_per_s
    assert smallest_good(rates) == expected
    taken = next(rate for rate in rates if rate.size == expected)
    assert taken.tokens_per_s >= SHARE * best
    assert all(r.tokens_per_s < SHARE * best for r in rates if r.size < expected)


def test_behind_a_peak_nothing_is_taken():
    rates = tuple(map(Rate, CHUNKS, (300, 700, 1000, 950, 600, 400)))
    assert chosen(rates) == (256, 1, ())


def test_exactly_80_percent_is_enough():
    assert smallest_good((Rate(1, 79.9), Rate(2, 80.0), Rate(4, 100.0))) == 2


@pytest.mark.parametrize("seed", range(50))
def test_noise_on_a_plateau_moves_the_choice_little(seed):
    """10 % up and down: what is taken has at least 65 % of the true peak (0.8 x 0.9 / 1.1)."""
    random = Random(seed)
    true = saturating(random.uniform(0, 600), 1.0)
    noisy = curve(CHUNKS, lambda size: true(size) * random.uniform(0.9, 1.1))
    taken, _, _ = chosen(noisy)
    assert true(taken) >= 0.65 * true(CHUNKS[-1])
    # Nor is a size passed over that is good enough under the worst of noise.
    sure = [size for size in CHUNKS if true(size) * 0.9 >= SHARE * true(CHUNKS[-1]) * 1.1]
    assert not sure or taken <= sure[0]


def test_both_curves_are_judged_alone():
    chunks = curve(CHUNKS, saturating(64, 1.0))
    batches = curve(BATCHES, saturating(2, 1.0))
    assert chosen(chunks, batches)[:2] == (256, 8)


def test_where_throughput_still_rises_the_end_of_the_sweep_is_told():
    rising = curve(CHUNKS, saturating(4000, 1.0))
    size, _, remarks = chosen(rising)
    assert size == 2048
    (remark,) = remarks
    assert "the sweep's end was reached: throughput still rises at 2048" in remark
    assert "--chunks" in remark
    (remark,) = chosen(FLAT, curve(BATCHES, float))[2]
    assert "rises at 64" in remark
    assert "--batches" in remark


def test_a_rise_within_noise_is_no_rise():
    almost = (Rate(1, 100.0), Rate(2, 100.0 * RISE_MIN - 0.1))
    assert chosen(almost, FLAT)[2] == ()
    clearly = (Rate(1, 100.0), Rate(2, 100.0 * RISE_MIN + 0.1))
    assert len(chosen(clearly, FLAT)[2]) == 1


def test_a_rise_up_to_an_earlier_peak_is_none():
    assert chosen((Rate(1, 100.0), Rate(2, 50.0), Rate(4, 90.0)))[2] == ()


def test_of_a_single_size_nobody_knows_what_lies_beyond():
    size, _, (remark,) = chosen((Rate(512, 10.0),))
    assert size == 512
    assert "only 512 was measured" in remark
    assert "measure several --chunks" in remark
    assert "rises" not in remark
    (remark,) = chosen(FLAT, (Rate(8, 10.0),))[2]
    assert "several --batches" in remark


def test_nobody_is_sent_to_measure_what_cannot_be():
    rising = curve(BATCHES, float)
    assert len(recommend(rising, rising).remarks) == 2
    (remark,) = recommend(rising, rising, limited={"--chunks"}).remarks
    assert "--batches" in remark
    (remark,) = recommend(
        (Rate(16, 1.0),), (Rate(1, 1.0),), None, {"--chunks", "--batches"}
    ).remarks
    assert remark == (
        "only 16 was measured, and nothing says that it is good: measure smaller --chunks"
    )


@pytest.mark.parametrize(
    ("rows_held", "expected"), [(None, 64), (80, 64), (79, 63), (40, 32), (10, 8), (2, 1), (1, 1)]
)
def test_memory_less_20_percent_bounds_the_batch(rows_held, expected):
    batches = curve(BATCHES, float)
    found = recommend(FLAT, batches, rows_held)
    assert found.settings.running_max == expected
    limited = [remark for remark in found.remarks if f"holds {rows_held} such requests" in remark]
    assert bool(limited) == (expected < 64)


def test_memory_that_holds_more_than_is_good_changes_nothing():
    assert chosen(FLAT, FLAT, rows_held=2) == (1, 1, ())


@pytest.mark.parametrize("seed", range(30))
def test_any_curve_gets_a_measured_size_of_80_percent(seed):
    random = Random(seed)
    sizes = sorted(random.sample(range(1, 5000), random.randint(1, 12)))
    rates = curve(sizes, lambda _: random.lognormvariate(0, 2))
    taken = smallest_good(rates)
    speed = {rate.size: rate.tokens_per_s for rate in rates}
    good = [size for size in sizes if speed[size] >= SHARE * max(speed.values())]
    assert taken == min(good)

"""The cost model that is fitted to measured steps."""

from dataclasses import astuple
from random import Random
from statistics import median

import pytest

from control_plane.scheduling.step_time import StepWork, context_of_chunk
from scripts.calibration.calibration_file import Point, StepTime
from scripts.calibration.step_time_fit import fit_step_time

TRUE = StepTime(0.012, 5e-4, 6e-8, 7e-4, 1.5e-6)


def works():
    """As a sweep measures them."""
    for size in (64, 128, 256, 512, 1024, 2048):
        yield StepWork(size, context_of_chunk((2048 - size) // 2, size), 0, 0)
    for start in (0, 1536):
        yield StepWork(512, context_of_chunk(start, 512), 0, 0)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        yield StepWork(0, 0, rows, rows * 257)
    yield StepWork(0, 0, 64, 64 * 33)
    yield StepWork(512, context_of_chunk(1536, 512), 8, 8 * 257)
    yield StepWork(64, context_of_chunk(1984, 64), 64, 64 * 257)


def points(model, noise=lambda: 1.0):
    return [Point(work, model.predict(work) * noise()) for work in works()]


def test_it_finds_what_the_steps_were_made_of():
    assert astuple(fit_step_time(points(TRUE))) == pytest.approx(astuple(TRUE), rel=1e-6)


@pytest.mark.parametrize("name", StepTime.__dataclass_fields__)
def test_a_term_that_costs_nothing_is_found_to_cost_nothing(name):
    values = dict(zip(StepTime.__dataclass_fields__, astuple(TRUE), strict=True)) | {name: 0.0}
    model = StepTime(**values)
    assert astuple(fit_step_time(points(model))) == pytest.approx(astuple(model), rel=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_noise_gives_no_negative_weight_and_predicts_still(seed):
    random = Random(seed)
    found = fit_step_time(points(TRUE, lambda: random.uniform(0.85, 1.15)))
    assert min(astuple(found)) >= 0
    errors = [abs(found.predict(work) / TRUE.predict(work) - 1) for work in works()]
    assert median(errors) < 0.1


def test_one_point_is_told_as_it_was():
    point = Point(StepWork(0, 0, 4, 400), 0.02)
    assert fit_step_time([point]).predict(point.work) == pytest.approx(0.02)


def test_terms_that_are_not_told_apart_are_explained_by_the_first():
    """Every chunk attends to as many tokens on average."""
    made = [Point(StepWork(size, size * 100, 0, 0), 0.01 + size * 1e-3) for size in (8, 16, 32)]
    found = fit_step_time(made)
    assert found.chunk_context_s == 0
    assert found.chunk_token_s == pytest.approx(1e-3)
    assert found.step_s == pytest.approx(0.01)

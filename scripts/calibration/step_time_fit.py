"""The cost model of a step, fitted to measured steps."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from scripts.calibration.calibration_file import Point, StepTime

GAIN_MIN = 1e-9
"""What a further term must take off the sum of squared errors."""


def fit_step_time(points: Sequence[Point]) -> StepTime:
    """The non-negative weights with the least sum of squared relative errors.

    Relative, because a step of a millisecond matters as much as one of a second where there are a
    hundred times as many. Solved exactly: of all sets of terms, 31 here, the best one whose least
    squares need no negative weight. Where points do not tell two terms apart, the first is taken.

    points: at least one, each longer than 0 seconds.
    """
    seconds = np.array([point.seconds for point in points])
    features = np.array([(1, *point.work) for point in points], dtype=float)
    scales = np.maximum(features.max(axis=0), 1.0)
    matrix = features / scales / seconds[:, None]
    target = np.ones(len(points))
    best, least = np.zeros(len(scales)), np.inf
    for count in range(1, len(scales) + 1):
        for terms in map(list, combinations(range(len(scales)), count)):
            weights = np.linalg.lstsq(matrix[:, terms], target, rcond=None)[0]
            error = float(np.square(matrix[:, terms] @ weights - target).sum())
            if (weights >= 0).all() and error < least - GAIN_MIN:
                best, least = np.zeros(len(scales)), error
                best[terms] = weights
    return StepTime(*(float(weight) for weight in best / scales))

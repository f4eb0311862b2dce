"""Confidence intervals for measurements that depend on each other, and where a run becomes steady.

Successive requests share queues and batches, so their times are correlated and the textbook interval is far too narrow.
Batch means divide the run into long batches, whose means are nearly independent (Law and Kelton, Simulation Modeling
and Analysis). A percentile gets the interval of the share of values below it (Woodruff, 1952), with that share's batch
means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Interval = tuple[float, float]

LEVEL = 0.95
FEWEST = 32
"""Values below which there is no interval."""
_FEWEST_BATCHES, _MOST_BATCHES = 8, 32
# Batches are joined in pairs while the correlation of neighbours is larger than this.
_CORRELATED = 0.1
_MSER_BATCH = 5


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of at least 0.5 of Student's t distribution, by bisection of its distribution function."""
    low, high = 0.0, 1.0
    while _t_probability(high, degrees) < probability:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _t_probability(middle, degrees) < probability else (low, middle)
    return high


def _t_probability(value: float, degrees: int) -> float:
    """Return the probability of a value up to this one, as a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(value / math.sqrt(degrees))
    term, total = (math.cos(angle) if degrees % 2 else 1.0), 0.0
    for number in range(1 + degrees % 2, degrees, 2):
        total += term
        term *= math.cos(angle) ** 2 * number / (number + 1)
    inside = math.sin(angle) * total
    return 0.5 + (inside / 2 if degrees % 2 == 0 else (angle + inside) / math.pi)


def _batch_error(values: npt.NDArray[np.float64], level: float = LEVEL) -> tuple[float, float]:
    """Return the standard error of the mean of `values`, in order of time, and the factor of its interval."""
    batches = _MOST_BATCHES if len(values) >= 8 * _MOST_BATCHES else _FEWEST_BATCHES
    means = _means(values, batches)
    while batches > _FEWEST_BATCHES and _correlation(means) > _CORRELATED:
        batches //= 2
        means = _means(values, batches)
    standard = float(means.std(ddof=1)) / math.sqrt(batches)
    return standard, t_quantile((1 + level) / 2, batches - 1)


def _means(values: npt.NDArray[np.float64], batches: int) -> npt.NDArray[np.float64]:
    size = len(values) // batches
    # The remainder is left out at the start, where a run is least steady.
    means: npt.NDArray[np.float64] = values[len(values) - size * batches :].reshape(batches, size).mean(axis=1)
    return means


def _correlation(means: npt.NDArray[np.float64]) -> float:
    """Return the lag-1 autocorrelation."""
    centred = means - means.mean()
    total = float((centred**2).sum())
    return float((centred[1:] * centred[:-1]).sum()) / total if total else 0.0


def mean_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval | None:
    """Return the interval of the mean of values in order of time, or None when there are too few."""
    import numpy as np

    if len(values) < FEWEST:
        return None
    array = np.asarray(values, np.float64)
    half = math.prod(_batch_error(array, level))
    return float(array.mean()) - half, float(array.mean()) + half


def quantile_interval(values: Sequence[float], quantile: float) -> Interval | None:
    """Return the interval of a percentile of values in order of time; None: not enough data.

    Infinite values, those of failed requests, are larger than all others.
    """
    import numpy as np

    count = len(values)
    if count < FEWEST:
        return None
    array = np.asarray(values, np.float64)
    ordered = np.sort(array)
    below = (array <= ordered[math.ceil(quantile * count) - 1]).astype(np.float64)
    standard, factor = _batch_error(below)
    # Never less than for independent values: few values beyond the percentile hide their spread.
    half = factor * max(standard, math.sqrt(quantile * (1 - quantile) / count))
    low, high = quantile - half, quantile + half
    if low <= 0 or high >= 1:
        return None
    return float(ordered[math.ceil(low * count) - 1]), float(ordered[math.ceil(high * count) - 1])


def effective_count(values: Sequence[float]) -> float | None:
    """Return how many independent values would tell as much about the mean."""
    import numpy as np

    array = np.asarray(values, np.float64)
    if len(array) < FEWEST or not array.var():
        return None
    standard, _ = _batch_error(array)
    return float(min(len(array), array.var(ddof=1) / standard**2)) if standard else None


def warmup_length(values: Sequence[float]) -> int:
    """Return how many values at the start belong to the warm-up, by MSER-5 (White, 1997).

    That is the cut after which the standard error of the mean is smallest. A cut in the second half of the run means
    that no steady state was reached; then the whole length is returned.
    """
    import numpy as np

    batches = len(values) // _MSER_BATCH
    if batches < 2 * _FEWEST_BATCHES:
        return 0
    means = _means(np.asarray(values, np.float64), batches)
    # From the end: sums of the last k means and of their squares give the variance of each tail.
    counts = np.arange(1, batches + 1)
    sums, squares = np.cumsum(means[::-1]), np.cumsum(means[::-1] ** 2)
    variances = np.maximum(0.0, squares / counts - (sums / counts) ** 2) / counts
    tails = variances[_FEWEST_BATCHES - 1 :][::-1]  # tail k is that after a cut of k batches
    cut = int(np.argmin(tails))
    return len(values) if cut >= batches // 2 else cut * _MSER_BATCH

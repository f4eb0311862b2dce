"""Intervals cover the truth of processes whose mean is known, and the cut of the warm-up finds its end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from trtserve.bench.statistics import effective_count, mean_interval, quantile_interval, t_quantile, warmup_length

RUNS = 150


def ar1(random: np.random.Generator, count: int = 1000, factor: float = 0.8) -> list[float]:
    """A stationary AR(1) process with mean 0."""
    noise = random.normal(size=count)
    value, values = float(random.normal()) / math.sqrt(1 - factor**2), []
    for step in noise:
        value = factor * value + float(step)
        values.append(value)
    return values


def covered(intervals: Sequence[tuple[float, float] | None], truth: float) -> float:
    return sum(each is not None and each[0] <= truth <= each[1] for each in intervals) / len(intervals)


def test_means_of_correlated_values_are_covered() -> None:
    """`make bench ARGS="--only client"` repeats this with more runs and queues."""
    random = np.random.default_rng(1)
    runs = [ar1(random) for _ in range(RUNS)]
    assert covered([mean_interval(run) for run in runs], 0.0) >= 0.90


@pytest.mark.parametrize("quantile", [0.5, 0.9])
def test_percentiles_of_correlated_values_are_covered(quantile: float) -> None:
    from statistics import NormalDist

    truth = NormalDist(0, 1 / math.sqrt(1 - 0.8**2)).inv_cdf(quantile)
    random = np.random.default_rng(2)
    found = [quantile_interval(ar1(random), quantile) for _ in range(RUNS)]
    assert covered(found, truth) >= 0.88


def test_too_few_values_have_no_interval() -> None:
    assert mean_interval([1.0] * 31) is None
    assert quantile_interval([float(value) for value in range(200)], 0.99) is None
    assert quantile_interval([float(value) for value in range(200)], 0.5) is not None


def test_failed_requests_widen_the_upper_end() -> None:
    values = [1.0] * 500 + [math.inf] * 60 + [2.0] * 440
    found = quantile_interval(values, 0.95)
    assert found is None or found[1] == math.inf


def test_effective_count_is_smaller_for_correlated_values() -> None:
    random = np.random.default_rng(3)
    alone = effective_count(random.normal(size=4000).tolist())
    together = effective_count(ar1(random, 4000, 0.9))
    assert alone is not None
    assert together is not None
    assert together < 0.5 * alone <= 2000


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.3027), (7, 2.3646), (15, 2.1314), (31, 2.0395), (1000, 1.9623)]
)
def test_t_quantiles(degrees: int, expected: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=0.0001)


def test_warm_up_is_cut_where_the_times_settle() -> None:
    random = np.random.default_rng(4)
    slow = 50 * np.exp(-np.arange(1000) / 20) + random.normal(10, 1, 1000)
    assert 30 <= warmup_length(slow.tolist()) <= 150
    assert warmup_length([1.0] * 20) == 0


def test_a_run_that_never_settles_has_no_steady_part() -> None:
    growing = [float(value) for value in range(1000)]
    assert warmup_length(growing) == 1000

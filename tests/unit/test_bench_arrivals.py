"""Schedules: mean rates, burstiness and ramps."""

from __future__ import annotations

import numpy as np
import pytest

from trtserve.bench.traffic import Arrivals, arrival_times


@pytest.mark.parametrize("kind", ["constant", "exponential", "gamma"])
def test_schedules_have_the_asked_rate(kind: Arrivals) -> None:
    times = arrival_times(kind, rate=50, count=20_000, seed=1)
    assert times[0] == 0
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(50, rel=0.03)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_burstiness_is_the_spread_of_the_gaps(shape: float) -> None:
    gaps = np.diff(arrival_times("gamma", rate=10, count=20_000, seed=2, burstiness=shape))
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.06)


@pytest.mark.parametrize(("first", "last"), [(10.0, 100.0), (100.0, 10.0)])
def test_ramps_change_the_rate_linearly(first: float, last: float) -> None:
    times = np.array(arrival_times("constant", rate=first, count=2000, seed=0, ramp_to=last))
    rates = 1 / np.diff(times)
    assert rates[0] == pytest.approx(first, rel=0.05)
    assert rates[-1] == pytest.approx(last, rel=0.05)
    middle = rates[np.searchsorted(times, times[-1] / 2)]
    assert middle == pytest.approx((first + last) / 2, rel=0.05)


def test_a_seed_fixes_the_schedule() -> None:
    first, again, other = (arrival_times("exponential", rate=5, count=50, seed=seed) for seed in (3, 3, 4))
    assert first == again != other

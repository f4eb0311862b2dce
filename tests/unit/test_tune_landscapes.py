"""On made-up machines, a search finds about the best in a fifth of the sweep's time."""

from __future__ import annotations

import pytest

from tests.support.tuning_landscapes import Landscape, score


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_search_without_a_goal_finds_about_the_best(size: str) -> None:
    found = score(Landscape.random(size, 0), "none", seed=0)
    assert found.found >= 0.9
    assert found.time <= 0.2

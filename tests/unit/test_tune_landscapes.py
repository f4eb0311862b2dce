"""On a made-up machine, a search finds about the best in a fifth of the sweep's time.

`make bench ARGS="--only landscapes"` has 120 machines.
"""

from __future__ import annotations

from tests.support.tuning_landscapes import Landscape, score


def test_a_search_finds_about_the_best_with_and_without_a_goal() -> None:
    landscape = Landscape.random("small", 0)
    for goal in ("none", "both"):
        found = score(landscape, goal, seed=0)
        assert found.found >= 0.95, goal
        assert found.time <= 0.2, goal
        assert found.own is None or found.own >= 1.0, goal
        later = [error for _, error in found.errors.values() if error is not None]
        assert max(later) <= 0.15, goal

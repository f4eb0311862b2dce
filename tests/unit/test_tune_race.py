"""A race finds what is better, and finds nothing among equals."""

from __future__ import annotations

import numpy as np
import pytest

from trtserve.pipeline.tuning.search import SURE, Race, Run


def race_of(values: dict[str, list[float]]) -> Race[str]:
    race = Race[str](comparisons=max(1, len(values) - 1))
    for name, runs in values.items():
        for value in runs:
            race.add(name, Run(value=value))
    return race


def test_what_is_clearly_worse_is_dropped_after_one_run() -> None:
    race = race_of({"a": [100.0], "b": [97.0], "c": [60.0]})
    assert race.survivors() == ["a", "b"]
    assert race.beats("a", "c")
    assert not race.beats("a", "b")
    assert not race.beats("a", "a")


def test_repeated_runs_tell_smaller_differences() -> None:
    assert race_of({"a": [100.0, 100.2, 99.9], "b": [95.0, 95.1, 94.9]}).survivors() == ["a"]


def test_noisy_runs_tell_less() -> None:
    low, high = race_of({"a": [100.0, 140.0], "b": [80.0, 110.0]}).difference("a", "b")
    assert low < 0 < high
    within = Race[str](comparisons=1)
    within.add("a", Run(value=100.0, error=0.2))
    within.add("b", Run(value=80.0, error=0.2))
    assert within.survivors() == ["a", "b"]


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.15])
def test_equals_are_equal_in_99_of_100_races(noise: float) -> None:
    """As in a search: the best of twenty single runs races the file's own configuration in fresh runs."""
    random, winners = np.random.default_rng(33), 0
    for _ in range(400):
        values = {number: [float(100 * np.exp(noise * random.standard_normal()))] for number in range(20)}
        chosen = max(values, key=lambda number: values[number][0])
        race = Race[int](comparisons=1)
        for _ in range(3):
            for number in {0, chosen}:
                race.add(number, Run(value=float(100 * np.exp(noise * random.standard_normal()))))
        winners += race.beats(chosen, 0, SURE)
    assert winners <= 0.01 * 400

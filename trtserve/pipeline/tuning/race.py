"""Which of several candidates is best, from noisy runs: a candidate is out when it is significantly worse.

Knows numbers and names only. Runs of one candidate differ by more than each run shows, so the spread between runs is
pooled over all candidates with repeated runs. It is at least about the allowance of `bench compare` while few were
repeated. All statements of one race hold together with 95 % (Bonferroni).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import Generic, TypeVar

from trtserve.bench.compare import DRIFT
from trtserve.bench.statistics import LEVEL, Interval, t_quantile

Name = TypeVar("Name")
SURE = 0.98
"""Level at which a winner replaces what it was compared with: at 95 %, three of a hundred equals did."""
_ASSUMED = (DRIFT / 2) ** 2
"""Variance of the logarithm of a run's mean, until runs were repeated."""
_ASSUMED_DEGREES = 8


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured value, above 0; larger is better."""

    value: float
    error: float = 0.0
    """Relative standard error within the run."""


@dataclass
class Race(Generic[Name]):
    """The runs of each candidate; `comparisons` is how many statements are made together."""

    comparisons: int
    runs: dict[Name, list[Run]] = field(default_factory=dict)

    def add(self, name: Name, run: Run) -> None:
        """Count a run."""
        self.runs.setdefault(name, []).append(run)

    def mean(self, name: Name) -> float:
        """Return the geometric mean of a candidate's runs."""
        return math.exp(fmean(math.log(run.value) for run in self.runs[name]))

    @property
    def leader(self) -> Name:
        """The candidate with the highest mean; of equal ones the first."""
        return max(self.runs, key=self.mean)

    def difference(self, name: Name, other: Name, level: float = LEVEL) -> Interval:
        """Return the interval of how much better `name` is than `other`, as a part of the latter."""
        within = fmean(run.error**2 for each in (name, other) for run in self.runs[each])
        errors = math.sqrt(sum(1 / len(self.runs[each]) for each in (name, other)))
        quantile = 1 - (1 - level) / (2 * max(1, self.comparisons))
        half = errors * max(
            t_quantile(quantile, degrees) * math.sqrt(max(variance, within)) for variance, degrees in self._spreads()
        )
        middle = math.log(self.mean(name) / self.mean(other))
        return math.expm1(middle - half), math.expm1(middle + half)

    def beats(self, name: Name, other: Name, level: float = LEVEL) -> bool:
        """Return whether `name` is better beyond the uncertainty."""
        return name != other and self.difference(name, other, level)[0] > 0

    def survivors(self) -> list[Name]:
        """Return the candidates that the leader does not beat, best first."""
        leader = self.leader
        left = [name for name in self.runs if not self.beats(leader, name)]
        return sorted(left, key=self.mean, reverse=True)

    def _spreads(self) -> list[tuple[float, int]]:
        """Return variance and degrees of freedom of the logarithms of runs around the means of their candidates.

        That is once as they are, and once with the assumed ones. A few runs may agree by luck, so the wider interval
        of the two counts.
        """
        total, degrees = 0.0, 0
        for each in self.runs.values():
            logs = [math.log(run.value) for run in each]
            total += sum((value - fmean(logs)) ** 2 for value in logs)
            degrees += len(logs) - 1
        assumed = (total + _ASSUMED * _ASSUMED_DEGREES) / (degrees + _ASSUMED_DEGREES), degrees + _ASSUMED_DEGREES
        return [assumed, (total / degrees, degrees)] if degrees else [assumed]

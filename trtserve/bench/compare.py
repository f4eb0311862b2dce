"""Compare two results: the difference of each figure with its interval, and whether it is a regression."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtserve.bench.goals import first_token_ms, latency_ms, per_token_ms
from trtserve.bench.intervals import FEWEST, Interval, mean_interval
from trtserve.bench.records import Record
from trtserve.bench.report import Report
from trtserve.errors import UsageError

_LEVEL = 0.95
_MEASURES: dict[str, Callable[[Record], float | None]] = {
    "time to first token (ms)": first_token_ms,
    "time per output token (ms)": per_token_ms,
    "request latency (ms)": latency_ms,
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One figure of two results; larger is worse."""

    name: str
    before: float
    after: float
    relative: float
    """(after - before) / before."""
    interval: Interval | None
    """Of `relative`; None: not enough data. The intervals of all figures hold together with 95 %."""
    paired: bool
    """Whether the same requests were compared one by one."""
    pairs: int

    def worse_than(self, allowed: float) -> bool:
        """Return whether the result is worse by more than `allowed`, beyond the uncertainty."""
        return self.interval is not None and self.interval[0] > allowed

    @property
    def better(self) -> bool:
        """Whether the result is better beyond the uncertainty."""
        return self.interval is not None and self.interval[1] < 0


def compare(before: Report, after: Report) -> list[Difference]:
    """Return the differences of the mean times, request by request if both runs sent the same requests.

    Raises UsageError if nothing can be compared.
    """
    found = [
        difference
        for name, measure in _MEASURES.items()
        if (difference := _difference(name, measure, before, after)) is not None
    ]
    if not found:
        raise UsageError("The two results have no completed answers in common to compare.")
    return found


def _difference(
    name: str, measure: Callable[[Record], float | None], before: Report, after: Report
) -> Difference | None:
    first, second = _values(before, measure), _values(after, measure)
    if not first or not second:
        return None
    # Several intervals are looked at together (Bonferroni).
    level = 1 - (1 - _LEVEL) / len(_MEASURES)
    shared = sorted(first.keys() & second.keys(), key=lambda index: first[index][0])
    paired = before.prompts_sha256 == after.prompts_sha256 and len(shared) >= min(FEWEST, len(first), len(second))
    if paired:
        base = _mean([first[index][1] for index in shared])
        changes = [second[index][1] - first[index][1] for index in shared]
        interval = mean_interval(changes, level=level)
        other = base + _mean(changes)
    else:
        ordered = [[value for _, value in sorted(each.values())] for each in (first, second)]
        base, other = _mean(ordered[0]), _mean(ordered[1])
        interval = _unpaired(ordered[0], ordered[1], level)
    if base <= 0:
        return None
    return Difference(
        name=name,
        before=base,
        after=other,
        relative=(other - base) / base,
        interval=None if interval is None else (interval[0] / base, interval[1] / base),
        paired=paired,
        pairs=len(shared) if paired else min(len(first), len(second)),
    )


def _values(report: Report, measure: Callable[[Record], float | None]) -> dict[int, tuple[int, float]]:
    """Return index → time of the schedule and value, for completed answers."""
    found = ((each, measure(each)) for each in report.records if each.status == "completed")
    return {each.index: (each.intended_ns, value) for each, value in found if value is not None}


def _unpaired(before: Sequence[float], after: Sequence[float], level: float) -> Interval | None:
    first, second = mean_interval(before, level=level), mean_interval(after, level=level)
    if first is None or second is None:
        return None
    difference = sum(second) / 2 - sum(first) / 2
    half = math.hypot((first[1] - first[0]) / 2, (second[1] - second[0]) / 2)
    return difference - half, difference + half


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

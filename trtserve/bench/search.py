"""Find the highest rate of requests at which a server still meets its goals."""

from __future__ import annotations

from collections.abc import Callable

from trtserve.bench.report import Report

GOOD_SHARE = 0.99
_MOST_DOUBLINGS = 12
_MOST_HALVINGS = 6  # each takes twice as long as the one before
_BISECTIONS = 4


def meets_goals(report: Report) -> bool:
    """Return whether 99 % of the answers are good, and neither the server nor the client fell behind."""
    counts = report.statistics.counts
    share = report.statistics.good_answers / counts.sent if counts.sent else 0.0
    return share >= GOOD_SHARE and report.verdict.judgement not in ("overloaded", "client-limited")


def highest_rate(meets: Callable[[float], bool], *, first: float) -> float | None:
    """Return the highest rate for which `meets` is true, within 5 %, or None when none was found.

    Doubles (or halves) from `first` until the answer changes, then bisects by ratio.
    """
    low: float | None = None
    high: float | None = None
    rate = first
    while low is None or high is None:
        if meets(rate):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
        if not first / 2**_MOST_HALVINGS <= rate <= first * 2**_MOST_DOUBLINGS:
            break
    if low is None or high is None:
        return low
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low

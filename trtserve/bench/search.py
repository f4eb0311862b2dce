"""Find the highest rate of requests at which a server still meets its goals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trtserve.bench.report import BenchReport
from trtserve.bench.verdict import VALID_DELIVERY

GOOD_SHARE = 0.99
TRIES = 3  # of a rate at which the client decided
_MOST_DOUBLINGS = 12
_MOST_HALVINGS = 6  # each takes twice as long as the one before
_BISECTIONS = 4

Answer = Literal["met", "missed", "unclear"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The highest rate that met the goals, and what was in the way of more."""

    rate: float | None
    """Requests/s; None if no rate met them."""
    beyond: float | None = None
    """The lowest rate that did not, or None if all that were tried met them."""
    limited_by: Literal["server", "client"] | None = None


def rate_answer(report: BenchReport) -> Answer:
    """Return whether 99 % of the answers were good and all requests were sent in their time.

    A client that falls behind makes times longer, so goals that are met nevertheless are met. Goals that are missed
    may be missed because of it: "unclear".
    """
    statistics, judgement = report.statistics, report.verdict.judgement
    share = statistics.good_answers / statistics.counts.sent if statistics.counts.sent else 0.0
    delivered = statistics.delivered_ratio
    in_time = delivered is None or delivered >= VALID_DELIVERY
    if share >= GOOD_SHARE and in_time and judgement not in ("overloaded", "implausible"):
        return "met"
    return "unclear" if judgement == "client-limited" else "missed"


def highest_rate(answer: Callable[[float], Answer], *, first: float) -> Found:
    """Return the highest rate that is met, within 5 %.

    Doubles (or halves) from `first` until the answer changes, then bisects by ratio.
    """
    low: float | None = None
    high: float | None = None
    answers: dict[float, Answer] = {}
    rate = first
    while low is None or high is None:
        answers[rate] = answer(rate)
        if answers[rate] == "met":
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
        if not first / 2**_MOST_HALVINGS <= rate <= first * 2**_MOST_DOUBLINGS:
            break
    if low is not None and high is not None:
        for _ in range(_BISECTIONS):
            middle = (low * high) ** 0.5
            answers[middle] = answer(middle)
            low, high = (middle, high) if answers[middle] == "met" else (low, middle)
    if high is None:
        return Found(rate=low)
    return Found(rate=low, beyond=high, limited_by="client" if answers[high] == "unclear" else "server")

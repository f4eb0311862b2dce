"""What a server must reach: the limits of a setup file, and the highest rate at which --slo is met."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trtserve.bench.statistics import QUANTILES, VALID_DELIVERY, Distribution, Statistics, read_duration
from trtserve.errors import UsageError

if TYPE_CHECKING:
    from trtserve.bench.report import BenchReport

_TIMES: Mapping[str, Callable[[Statistics], Distribution]] = {
    "ttft": lambda statistics: statistics.time_to_first_token_ms,
    "itl": lambda statistics: statistics.inter_token_ms,
    "tpot": lambda statistics: statistics.time_per_output_token_ms,
    "latency": lambda statistics: statistics.latency_ms,
}
_RATES: Mapping[str, Callable[[Statistics], float]] = {
    "requests_per_second": lambda statistics: statistics.requests_per_second,
    "tokens_per_second": lambda statistics: statistics.output_tokens_per_second,
    "good_share": lambda statistics: statistics.good_answers / max(1, statistics.counts.sent),
}
TIMES = tuple(f"{measure}_{figure}" for measure in _TIMES for figure in ("mean", *QUANTILES))
"""Limits that a time must not exceed, such as ttft_p99."""
RATES = tuple(_RATES)
"""Limits that a figure must meet. `good_share` is the part of the answers that meet --slo, from 0 to 1."""


def missed_by(statistics: Statistics, limits: Mapping[str, float]) -> list[str]:
    """Return one sentence for each limit that is not met; a figure that was not measured does not meet it."""
    return [text for name, limit in limits.items() if (text := _missed(name, limit, statistics)) is not None]


def read_requirements(words: Mapping[str, str]) -> dict[str, float]:
    """Read limits such as `ttft_p99: 300ms` and `tokens_per_second: 200`; times become milliseconds.

    Raises UsageError for anything else.
    """
    limits = {}
    for name, text in words.items():
        if name in TIMES:
            value, wanted = read_duration(text), "a time such as 300ms or 2s"
        elif name in RATES:
            value, wanted = _number(text), "a number above 0"
        else:
            raise UsageError(f"{name} is not a limit.", hint=f"Known: {', '.join((*TIMES, *RATES))}.")
        if value is None:
            raise UsageError(f"{name} is {text!r}; expected {wanted}.")
        limits[name] = value
    return limits


_GOAL = re.compile(r"(\w+)(?:\s+(mean|p\d\d))?\s*([<>])=?\s*([\d.]+)\s*(us|ms|s)?")


def read_goal(text: str) -> dict[str, float]:
    """Read a goal such as `ttft p99 < 500 ms, itl p99 < 40 ms, tokens_per_second > 50` as limits, times in ms.

    Raises UsageError for anything else.
    """
    words = {}
    for part in filter(None, map(str.strip, text.split(","))):
        match = _GOAL.fullmatch(part)
        name = match and "_".join(filter(None, (match[1], match[2])))
        if match is None or name is None or match[3] != (">" if name in _RATES else "<"):
            raise UsageError(
                f"The goal {part!r} cannot be read.",
                hint="Write `ttft p99 < 500 ms, itl p99 < 40 ms`: a measure, a figure, < and a time; or a rate and >.",
            )
        words[name] = match[4] + (match[5] or "")
    return read_requirements(words)


def goal_words(limits: Mapping[str, float]) -> str:
    """Return limits as `read_goal` reads them."""
    parts = (
        f"{name} > {limit:g}" if name in _RATES else f"{name.replace('_', ' ')} < {limit:g} ms"
        for name, limit in limits.items()
    )
    return ", ".join(parts)


def figure_of(statistics: Statistics, name: str) -> float | None:
    """Return the figure that a limit is about: a rate, or milliseconds; None if it was not measured."""
    if name in _RATES:
        return _RATES[name](statistics)
    measure, _, figure = name.rpartition("_")
    value: float | None = getattr(_TIMES[measure](statistics), figure)
    return value


def _missed(name: str, limit: float, statistics: Statistics) -> str | None:
    value = figure_of(statistics, name)
    if name in _RATES:
        return None if value is not None and value >= limit else f"{name} is {value:.4g}, below {limit:g}"
    if value is None:
        return f"{name} was not measured"
    if value <= limit:
        return None
    return f"{name} is {'infinite (failed requests)' if math.isinf(value) else f'{value:.1f} ms'}, above {limit:g} ms"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


GOOD_SHARE = 0.99
TRIES = 3  # of a rate at which the client decided
_MOST_DOUBLINGS = 12
_MOST_HALVINGS = 6  # each takes twice as long as the one before
_BISECTIONS = 4

Answer = Literal["met", "missed", "unclear"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The highest rate that met the goals, and what was in the way of more."""

    rate: float | None  # requests/s; None if no rate met them
    beyond: float | None = None  # the lowest rate that did not, or None if all that were tried met them
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
    return "unclear" if judgement in ("client-limited", "disturbed") else "missed"


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

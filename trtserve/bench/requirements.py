"""Targets of a benchmark's figures: the limits of a setup file, which decide whether `up` succeeded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trtserve.bench.statistics import QUANTILES, Distribution, Statistics, read_duration
from trtserve.errors import UsageError

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


@dataclass(frozen=True)
class Requirements:
    """Limits by name: milliseconds for those of `TIMES`."""

    limits: Mapping[str, float]

    def missed_by(self, statistics: Statistics) -> list[str]:
        """Return one sentence for each limit that is not met; a figure that was not measured does not meet it."""
        return [text for name, limit in self.limits.items() if (text := _missed(name, limit, statistics)) is not None]


def read_requirements(words: Mapping[str, str]) -> Requirements:
    """Read limits such as `ttft_p99: 300ms` and `tokens_per_second: 200`. Raises UsageError for anything else."""
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
    return Requirements(limits)


def _missed(name: str, limit: float, statistics: Statistics) -> str | None:
    if name in _RATES:
        rate = _RATES[name](statistics)
        return None if rate >= limit else f"{name} is {rate:.4g}, below {limit:g}"
    measure, _, figure = name.rpartition("_")
    value: float | None = getattr(_TIMES[measure](statistics), figure)
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

"""Service level objectives: what an answer must meet to count as good."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from trtserve.bench.records import Record
from trtserve.errors import UsageError

_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)?")


def latency_ms(record: Record) -> float:
    """Return milliseconds from the intended send to the end."""
    return (record.ended_ns - record.intended_ns) / 1e6


def first_token_ms(record: Record) -> float | None:
    """Return milliseconds from the intended send to the first token, or None without a stream or a token."""
    if not record.streamed or not record.arrivals:
        return None
    return (record.arrivals[0][0] - record.intended_ns) / 1e6


def per_token_ms(record: Record) -> float | None:
    """Return milliseconds per token after the first response, whose own tokens came together."""
    if not record.streamed or len(record.arrivals) < 2:
        return None
    (first, tokens), (last, _) = record.arrivals[0], record.arrivals[-1]
    return (last - first) / 1e6 / (record.output_tokens - tokens)


def longest_gap_ms(record: Record) -> float | None:
    """Return the longest time between two responses with tokens."""
    if not record.streamed or len(record.arrivals) < 2:
        return None
    times = [time for time, _ in record.arrivals]
    return max(after - before for before, after in pairwise(times)) / 1e6


MEASURES: Mapping[str, Callable[[Record], float | None]] = {
    "ttft": first_token_ms,
    "itl": longest_gap_ms,
    "tpot": per_token_ms,
    "latency": latency_ms,
}


@dataclass(frozen=True)
class Goals:
    """Limits in milliseconds by the name of the measure; empty: every completed answer is good."""

    limits_ms: Mapping[str, float]

    def met_by(self, record: Record) -> bool:
        """Return whether an answer is complete and within every limit; what it has no value of does not count."""
        if record.status != "completed":
            return False
        values = ((MEASURES[name](record), limit) for name, limit in self.limits_ms.items())
        return all(value is None or value <= limit for value, limit in values)

    def __bool__(self) -> bool:
        return bool(self.limits_ms)

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in self.limits_ms.items())


def read_goals(words: Mapping[str, str]) -> Goals:
    """Read the words of --slo. Raises UsageError for unknown names and units."""
    limits = {}
    for name, text in words.items():
        limit = read_duration(text)
        if name not in MEASURES or limit is None:
            raise UsageError(
                f"--slo {name}={text} cannot be read.",
                hint=f"Name {', '.join(MEASURES)} with a time: --slo ttft=200ms,itl=50ms.",
            )
        limits[name] = limit
    return Goals(limits)


def read_duration(text: str) -> float | None:
    """Return the milliseconds of a time such as 300ms, 2s or 5 (milliseconds), or None for anything else."""
    match = _DURATION.fullmatch(text)
    return None if match is None else float(match[1]) * _UNITS_MS[match[2] or "ms"]

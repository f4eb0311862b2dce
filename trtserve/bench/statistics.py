"""Compute figures from the records of requests: distributions, rates, counts, and answers that meet --slo."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from trtserve.bench.records import RequestRecord, first_token_ms, latency_ms, longest_gap_ms, per_token_ms
from trtserve.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)?")


MEASURES: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "ttft": first_token_ms,
    "itl": longest_gap_ms,
    "tpot": per_token_ms,
    "latency": latency_ms,
}


@dataclass(frozen=True)
class Goals:
    """Limits in milliseconds by the name of the measure; empty: every completed answer is good."""

    limits_ms: Mapping[str, float]

    def met_by(self, record: RequestRecord) -> bool:
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


NANOSECONDS_PER_MS = 1e6
VALID_DELIVERY = 0.99  # lowest delivered / offered rate of a valid open loop
QUANTILES = {"p50": 0.50, "p75": 0.75, "p90": 0.90, "p95": 0.95, "p99": 0.99}
_EVERY_GOAL = Goals({})
# Intervals need values in order of time; those of single tokens are far more than their requests can tell.
_MOST_VALUES = 200_000


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Summary of a sample in which a failed request counts as infinitely large.

    Percentiles follow upstream's rule, sorted[ceil(q·n) − 1], over all values; they are infinite where they fall on a
    failed request. All are None when nothing was observed.
    """

    count: int  # observed values
    censored: int  # values known only to be larger than all observed ones (failed requests)
    mean: float | None = None  # of the observed values
    deviation: float | None = None  # standard deviation of the observed values
    minimum: float | None = None
    p50: float | None = None
    p75: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    maximum: float | None = None
    intervals: Mapping[str, Interval | None] = field(default_factory=dict)
    """95 % intervals of the mean and the percentiles, which allow for autocorrelation; None: not enough data."""
    effective_count: float | None = None
    """Independent values that would tell as much about the mean; None where there are too few."""


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """Return upstream's percentile of sorted values: sorted[ceil(q·n) − 1]."""
    return ordered[math.ceil(quantile * len(ordered)) - 1]


def summarize(values: Iterable[float]) -> Distribution:
    """Return the distribution of `values` from 0 up, in order of time; infinite ones are censored."""
    given = list(values)
    observed = sorted(value for value in given if value != math.inf)
    censored = len(given) - len(observed)
    if not observed:
        return Distribution(count=0, censored=censored)
    ordered = observed + [math.inf] * censored
    finite = [value for value in given if value != math.inf]
    mean = math.fsum(observed) / len(observed)
    found: dict[str, Interval | None] = {}
    if len(given) <= _MOST_VALUES:
        around = mean_interval(finite)
        found = {"mean": None if around is None else (max(0.0, around[0]), around[1])}
        found |= {name: quantile_interval(given, quantile) for name, quantile in QUANTILES.items()}
    return Distribution(
        count=len(observed),
        censored=censored,
        mean=mean,
        deviation=math.sqrt(math.fsum((value - mean) ** 2 for value in observed) / len(observed)),
        minimum=observed[0],
        **{name: percentile(ordered, quantile) for name, quantile in QUANTILES.items()},
        maximum=ordered[-1],
        intervals=found,
        effective_count=effective_count(finite) if len(given) <= _MOST_VALUES else None,
    )


def highest_known(distributions: Sequence[Distribution]) -> str | None:
    """Return the highest percentile above the median for which all distributions have enough data."""
    above = ("p99", "p95", "p90", "p75")
    return next((name for name in above if all(each.intervals.get(name) for each in distributions)), None)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of requests: planned = sent + unsent; sent = completed + failed + cancelled."""

    planned: int
    sent: int
    completed: int
    failed: int
    cancelled: int

    @property
    def unsent(self) -> int:
        """Planned requests that were never sent."""
        return self.planned - self.sent


@dataclass(frozen=True, kw_only=True)
class Steady:
    """The part of the window after the warm-up that MSER finds and before the drain at the end."""

    warmup_requests: int
    """Requests at the start that differ from the rest; all of them if no steady state was reached."""
    seconds: float = 0.0
    requests_per_second: float = 0.0
    output_tokens_per_second: float = 0.0
    in_flight: float = 0.0
    """Average number of requests in flight, in the time between the first and the last send of this part."""
    drain_seconds: float = 0.0
    """From the last send of the window to the last end: the load falls, so its answers do not count as throughput."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Figures of one measured window."""

    counts: Counts
    total_latency_ms: float  # from the first send to the last end
    requests_per_second: float
    output_tokens_per_second: float
    goodput_per_second: float  # completed answers within all limits of --slo, per second
    good_answers: int
    requests_in_flight: float  # average over the window
    latency_ms: Distribution  # from the intended send to the end
    latency_from_send_ms: Distribution  # from the actual send to the end
    dispatch_delay_ms: Distribution
    """From the intended to the actual send: the wait in the client's queue, and its own lateness."""
    time_to_first_token_ms: Distribution
    time_to_second_token_ms: Distribution  # from the first to the second response with tokens
    inter_token_ms: Distribution
    """One value per token after the first response; tokens of one response share the gap before it."""
    inter_response_ms: Distribution  # one value per response with tokens after the first
    time_per_output_token_ms: Distribution  # (last - first response) / tokens after the first response, per request
    tokens_per_second_per_user: Distribution
    """Tokens of an answer / its whole time, from the intended send to the end, so that no burst makes it fast."""
    tokens_per_response: float
    input_tokens_per_request: float
    output_tokens_per_request: float
    short_answers: int  # completed answers without the requested length
    empty_answers: int  # completed answers without a token, which have no time to first token
    delivered_ratio: float | None  # delivered / offered rate of an open loop, or None for a closed one
    finish_reasons: Mapping[str, int]
    """Completed answers by reason, most frequent first, or empty where the model does not report it."""
    steady: Steady


def compute(records: Sequence[RequestRecord], goals: Goals = _EVERY_GOAL) -> Statistics:
    """Return the figures of `records`, one per planned request. Rates count completed requests only."""
    records = sorted(records, key=lambda record: (record.sent_ns is None, record.intended_ns, record.index))
    completed = [record for record in records if record.status == "completed"]
    answered = [record for record in records if record.status != "cancelled"]
    sent = [record for record in records if record.sent_ns is not None]
    starts = [record.sent_ns for record in sent if record.sent_ns is not None]
    window = max(record.ended_ns for record in sent) - min(starts) if starts else 0
    output_tokens = sum(record.output_tokens for record in completed)
    busy = math.fsum(r.ended_ns - r.sent_ns for r in sent if r.ended_ns and r.sent_ns is not None)
    good = sum(goals.met_by(record) for record in completed)
    responses = sum(len(record.arrivals) for record in completed)
    return Statistics(
        counts=count(records),
        total_latency_ms=window / NANOSECONDS_PER_MS,
        requests_per_second=_rate(len(completed), window),
        output_tokens_per_second=_rate(output_tokens, window),
        goodput_per_second=_rate(good, window),
        good_answers=good,
        requests_in_flight=busy / window if window else 0.0,
        latency_ms=summarize(latency_ms(r) if r.status == "completed" else math.inf for r in answered),
        latency_from_send_ms=_milliseconds(
            r.ended_ns - r.sent_ns if r.status == "completed" else math.inf for r in answered if r.sent_ns is not None
        ),
        dispatch_delay_ms=_milliseconds(r.sent_ns - r.intended_ns for r in sent if r.sent_ns is not None),
        time_to_first_token_ms=summarize(_first_tokens(answered)),
        time_to_second_token_ms=_milliseconds(
            r.arrivals[1][0] - r.arrivals[0][0] for r in completed if r.streamed and len(r.arrivals) > 1
        ),
        inter_token_ms=_milliseconds(gap for record in completed for gap in token_gaps(record)),
        inter_response_ms=_milliseconds(
            after - before for record in completed for (before, _), (after, _) in pairwise(record.arrivals)
        ),
        time_per_output_token_ms=summarize(
            value for record in completed if (value := per_token_ms(record)) is not None
        ),
        tokens_per_second_per_user=summarize(
            record.output_tokens * 1000 / whole for record in completed if (whole := latency_ms(record)) > 0
        ),
        tokens_per_response=output_tokens / responses if responses else 0.0,
        input_tokens_per_request=_mean([record.input_tokens for record in completed]),
        output_tokens_per_request=_mean([record.output_tokens for record in completed]),
        short_answers=sum(record.output_tokens != record.requested_tokens for record in completed),
        empty_answers=sum(not record.arrivals for record in completed),
        delivered_ratio=_delivered_ratio(sent),
        finish_reasons=dict(Counter(each.finish_reason for each in completed if each.finish_reason).most_common()),
        steady=_steady(sent),
    )


def _first_tokens(answered: Iterable[RequestRecord]) -> Iterable[float]:
    for record in answered:
        first = first_token_ms(record)
        if record.status == "failed":
            yield math.inf
        elif first is not None:
            yield first


def _steady(sent: Sequence[RequestRecord]) -> Steady:
    """Return the rates between the first send after the warm-up and the last send.

    `sent` is in the order of the schedule. Completions in that time count, whenever their requests were sent.
    """
    finished = [record for record in sent if record.status == "completed"]
    warmup = warmup_length([first_token_ms(record) or latency_ms(record) for record in finished])
    sends = [record.sent_ns for record in sent if record.sent_ns is not None]
    if not finished or len(sends) < 2:
        return Steady(warmup_requests=warmup)
    start = finished[warmup].sent_ns if warmup < len(finished) else min(sends)
    begin, last = start if start is not None else min(sends), max(sends)
    inside = [record for record in finished if begin < record.ended_ns <= last]
    busy = math.fsum(
        max(0, min(record.ended_ns, last) - max(record.sent_ns, begin)) for record in sent if record.sent_ns is not None
    )
    return Steady(
        warmup_requests=warmup,
        seconds=(last - begin) / 1e9,
        requests_per_second=_rate(len(inside), last - begin),
        output_tokens_per_second=_rate(sum(record.output_tokens for record in inside), last - begin),
        in_flight=busy / (last - begin) if last > begin else 0.0,
        drain_seconds=(max(record.ended_ns for record in sent) - last) / 1e9,
    )


def count(records: Sequence[RequestRecord]) -> Counts:
    return Counts(
        planned=len(records),
        sent=sum(record.sent_ns is not None for record in records),
        completed=sum(record.status == "completed" for record in records),
        failed=sum(record.status == "failed" for record in records),
        cancelled=sum(record.status == "cancelled" and record.sent_ns is not None for record in records),
    )


def token_gaps(record: RequestRecord) -> list[float]:
    """Return the nanoseconds between tokens; tokens of one response share the gap before it."""
    pairs = pairwise(record.arrivals)
    return [(after - before) / tokens for (before, _), (after, tokens) in pairs for _ in range(tokens)]


def _milliseconds(nanoseconds: Iterable[float]) -> Distribution:
    return summarize(value / NANOSECONDS_PER_MS for value in nanoseconds)


def _rate(amount: int, nanoseconds: int) -> float:
    return amount / (nanoseconds / 1e9) if nanoseconds > 0 else 0.0


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _delivered_ratio(sent: Sequence[RequestRecord]) -> float | None:
    scheduled = [record for record in sent if record.scheduled and record.sent_ns is not None]
    if len(scheduled) < 2:
        return None
    actual = [record.sent_ns for record in scheduled if record.sent_ns is not None]
    offered = scheduled[-1].intended_ns - scheduled[0].intended_ns
    spread = max(actual) - min(actual)
    return offered / spread if spread > 0 else None


Interval = tuple[float, float]

LEVEL = 0.95
FEWEST = 32  # values below which there is no interval
_FEWEST_BATCHES, _MOST_BATCHES = 8, 32
# Batches are joined in pairs while the correlation of neighbours is larger than this.
_CORRELATED = 0.1
_MSER_BATCH = 5


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of at least 0.5 of Student's t distribution, by bisection of its distribution function."""
    low, high = 0.0, 1.0
    while _t_probability(high, degrees) < probability:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _t_probability(middle, degrees) < probability else (low, middle)
    return high


def _t_probability(value: float, degrees: int) -> float:
    """Return the probability of a value up to this one, as a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(value / math.sqrt(degrees))
    term, total = (math.cos(angle) if degrees % 2 else 1.0), 0.0
    for number in range(1 + degrees % 2, degrees, 2):
        total += term
        term *= math.cos(angle) ** 2 * number / (number + 1)
    inside = math.sin(angle) * total
    return 0.5 + (inside / 2 if degrees % 2 == 0 else (angle + inside) / math.pi)


def _batch_error(values: npt.NDArray[np.float64], level: float = LEVEL) -> tuple[float, float]:
    """Return the standard error of the mean of `values`, in order of time, and the factor of its interval."""
    batches = _MOST_BATCHES if len(values) >= 8 * _MOST_BATCHES else _FEWEST_BATCHES
    means = _means(values, batches)
    while batches > _FEWEST_BATCHES and _correlation(means) > _CORRELATED:
        batches //= 2
        means = _means(values, batches)
    standard = float(means.std(ddof=1)) / math.sqrt(batches)
    return standard, t_quantile((1 + level) / 2, batches - 1)


def _means(values: npt.NDArray[np.float64], batches: int) -> npt.NDArray[np.float64]:
    size = len(values) // batches
    # The remainder is left out at the start, where a run is least steady.
    means: npt.NDArray[np.float64] = values[len(values) - size * batches :].reshape(batches, size).mean(axis=1)
    return means


def _correlation(means: npt.NDArray[np.float64]) -> float:
    """Return the lag-1 autocorrelation."""
    centred = means - means.mean()
    total = float((centred**2).sum())
    return float((centred[1:] * centred[:-1]).sum()) / total if total else 0.0


def mean_interval(values: Sequence[float], *, level: float = LEVEL) -> Interval | None:
    """Return the interval of the mean of values in order of time, or None when there are too few."""
    import numpy as np

    if len(values) < FEWEST:
        return None
    array = np.asarray(values, np.float64)
    half = math.prod(_batch_error(array, level))
    return float(array.mean()) - half, float(array.mean()) + half


def quantile_interval(values: Sequence[float], quantile: float) -> Interval | None:
    """Return the interval of a percentile of values in order of time; None: not enough data.

    Infinite values, those of failed requests, are larger than all others.
    """
    import numpy as np

    count = len(values)
    if count < FEWEST:
        return None
    array = np.asarray(values, np.float64)
    ordered = np.sort(array)
    below = (array <= ordered[math.ceil(quantile * count) - 1]).astype(np.float64)
    standard, factor = _batch_error(below)
    # Never less than for independent values: few values beyond the percentile hide their spread.
    half = factor * max(standard, math.sqrt(quantile * (1 - quantile) / count))
    low, high = quantile - half, quantile + half
    if low <= 0 or high >= 1:
        return None
    return float(ordered[math.ceil(low * count) - 1]), float(ordered[math.ceil(high * count) - 1])


def effective_count(values: Sequence[float]) -> float | None:
    """Return how many independent values would tell as much about the mean."""
    import numpy as np

    array = np.asarray(values, np.float64)
    if len(array) < FEWEST or not array.var():
        return None
    standard, _ = _batch_error(array)
    return float(min(len(array), array.var(ddof=1) / standard**2)) if standard else None


def warmup_length(values: Sequence[float]) -> int:
    """Return how many values at the start belong to the warm-up, by MSER-5 (White, 1997).

    That is the cut after which the standard error of the mean is smallest. A cut in the second half of the run means
    that no steady state was reached; then the whole length is returned.
    """
    import numpy as np

    batches = len(values) // _MSER_BATCH
    if batches < 2 * _FEWEST_BATCHES:
        return 0
    means = _means(np.asarray(values, np.float64), batches)
    # From the end: sums of the last k means and of their squares give the variance of each tail.
    counts = np.arange(1, batches + 1)
    sums, squares = np.cumsum(means[::-1]), np.cumsum(means[::-1] ** 2)
    variances = np.maximum(0.0, squares / counts - (sums / counts) ** 2) / counts
    tails = variances[_FEWEST_BATCHES - 1 :][::-1]  # tail k is that after a cut of k batches
    cut = int(np.argmin(tails))
    return len(values) if cut >= batches // 2 else cut * _MSER_BATCH

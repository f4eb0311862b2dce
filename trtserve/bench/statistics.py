"""From records of requests to figures: distributions, rates and the five counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trtserve.bench.load import Record

NANOSECONDS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Summary of a sample; a value that was never observed (a failed request) counts as infinitely large.

    `mean` is over the observed values. Percentiles follow upstream's rule, sorted[ceil(q·n) − 1] over all of them, and
    are infinite where they fall on a censored one. All are None when nothing was observed.
    """

    count: int
    censored: int
    mean: float | None = None
    minimum: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    maximum: float | None = None


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """Upstream's percentile of sorted values: sorted[ceil(q·n) − 1]."""
    return ordered[math.ceil(quantile * len(ordered)) - 1]


def summarize(values: Iterable[float], *, censored: int = 0) -> Distribution:
    """The distribution of `values` and of `censored` more that are only known to be larger."""
    observed = sorted(values)
    if not observed:
        return Distribution(count=0, censored=censored)
    ordered = observed + [math.inf] * censored
    return Distribution(
        count=len(observed),
        censored=censored,
        mean=math.fsum(observed) / len(observed),
        minimum=observed[0],
        p50=percentile(ordered, 0.50),
        p90=percentile(ordered, 0.90),
        p99=percentile(ordered, 0.99),
        maximum=ordered[-1],
    )


@dataclass(frozen=True, kw_only=True)
class Counts:
    """offered = sent + unsent; sent = completed + failed + cancelled."""

    offered: int
    sent: int
    completed: int
    failed: int
    cancelled: int

    @property
    def unsent(self) -> int:
        """Offered requests that were never sent."""
        return self.offered - self.sent


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Figures of one measured window; times in ms, rates per second.

    `latency` counts from the intended send, `latency_from_send` from the actual one; `dispatch_delay` is the
    difference. `inter_token` has one value per token after the first response; tokens that came in one response share
    the gap before it. `time_per_output_token` is (last − first response) ÷ tokens after the first response, of each
    request. `empty_answers` were completed without a token and have no time to the first. `finish_reasons` counts why
    completed answers ended, most frequent first; it is empty where the model does not tell.
    """

    counts: Counts
    total_latency: float
    requests_per_second: float
    output_tokens_per_second: float
    in_flight: float
    latency: Distribution
    latency_from_send: Distribution
    dispatch_delay: Distribution
    time_to_first_token: Distribution
    inter_token: Distribution
    time_per_output_token: Distribution
    input_tokens: float
    output_tokens: float
    short_answers: int
    empty_answers: int
    delivered_ratio: float | None
    finish_reasons: Mapping[str, int]


def compute(records: Sequence[Record]) -> Statistics:
    """Figures of `records`, one per offered request. Rates count completed requests only."""
    completed = [record for record in records if record.status == "completed"]
    sent = [record for record in records if record.sent is not None]
    lost = sum(record.status == "failed" for record in records)
    window = _window(sent)
    output_tokens = sum(record.output_tokens for record in completed)
    busy = math.fsum(record.ended - record.sent for record in sent if record.ended and record.sent is not None)
    return Statistics(
        counts=count(records),
        total_latency=window / NANOSECONDS_PER_MS,
        requests_per_second=_rate(len(completed), window),
        output_tokens_per_second=_rate(output_tokens, window),
        in_flight=busy / window if window else 0.0,
        latency=_milliseconds((r.ended - r.intended for r in completed), censored=lost),
        latency_from_send=_milliseconds((r.ended - r.sent for r in completed if r.sent is not None), censored=lost),
        dispatch_delay=_milliseconds(r.sent - r.intended for r in sent if r.sent is not None),
        time_to_first_token=_milliseconds(
            (r.arrivals[0][0] - r.intended for r in completed if r.streamed and r.arrivals), censored=lost
        ),
        inter_token=_milliseconds(gap for record in completed for gap in token_gaps(record)),
        time_per_output_token=_milliseconds(
            _pace(record) for record in completed if len(record.arrivals) > 1 and record.streamed
        ),
        input_tokens=_mean([record.input_tokens for record in completed]),
        output_tokens=_mean([record.output_tokens for record in completed]),
        short_answers=sum(record.output_tokens != record.requested_tokens for record in completed),
        empty_answers=sum(not record.arrivals for record in completed),
        delivered_ratio=_delivered(sent),
        finish_reasons=dict(Counter(each.finish_reason for each in completed if each.finish_reason).most_common()),
    )


def count(records: Sequence[Record]) -> Counts:
    """The five counts of a run."""
    return Counts(
        offered=len(records),
        sent=sum(record.sent is not None for record in records),
        completed=sum(record.status == "completed" for record in records),
        failed=sum(record.status == "failed" for record in records),
        cancelled=sum(record.status == "cancelled" and record.sent is not None for record in records),
    )


def token_gaps(record: Record) -> list[float]:
    """Nanoseconds between tokens: the gap before a response, shared by the tokens in it."""
    pairs = pairwise(record.arrivals)
    return [(after - before) / tokens for (before, _), (after, tokens) in pairs for _ in range(tokens)]


def _pace(record: Record) -> float:
    """Nanoseconds per token after the first response, whose own tokens came together."""
    (first, tokens), (last, _) = record.arrivals[0], record.arrivals[-1]
    return (last - first) / (record.output_tokens - tokens)


def _milliseconds(nanoseconds: Iterable[float], *, censored: int = 0) -> Distribution:
    return summarize((value / NANOSECONDS_PER_MS for value in nanoseconds), censored=censored)


def _window(sent: Sequence[Record]) -> int:
    """Nanoseconds from the first send to the last end."""
    starts = [record.sent for record in sent if record.sent is not None]
    return max(record.ended for record in sent) - min(starts) if starts else 0


def _rate(amount: int, nanoseconds: int) -> float:
    return amount / (nanoseconds / 1e9) if nanoseconds > 0 else 0.0


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _delivered(sent: Sequence[Record]) -> float | None:
    """Delivered ÷ offered rate of an open loop; None for a closed one."""
    scheduled = [record for record in sent if record.scheduled and record.sent is not None]
    if len(scheduled) < 2:
        return None
    actual = [record.sent for record in scheduled if record.sent is not None]
    offered = scheduled[-1].intended - scheduled[0].intended
    spread = max(actual) - min(actual)
    return offered / spread if spread > 0 else None

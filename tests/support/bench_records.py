"""Records of made-up runs, whose truth is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trtserve.bench.records import RequestRecord
from trtserve.bench.report import BenchReport

MS = 1_000_000


def answered(
    index: int,
    *,
    intended: float,
    first: float = 20.0,
    step: float = 5.0,
    tokens: int = 8,
    late: float = 0.0,
    scheduled: bool = False,
) -> RequestRecord:
    """A completed answer; `intended` is a moment, the rest durations, all in milliseconds."""
    sent = intended + late
    arrivals = [(round((sent + first + number * step) * MS), 1) for number in range(tokens)]
    return RequestRecord(
        index=index,
        input_tokens=16,
        requested_tokens=tokens,
        intended_ns=round(intended * MS),
        sent_ns=round(sent * MS),
        ended_ns=arrivals[-1][0],
        status="completed",
        scheduled=scheduled,
        streamed=True,
        arrivals=arrivals,
    )


def correlated(count: int, *, seed: int, mean: float = 20.0, spread: float = 2.0) -> list[float]:
    """Positive values of an AR(1) process, in which each depends on the one before it."""
    random = np.random.default_rng(seed)
    values, noise = [], 0.0
    for step in random.normal(0.0, spread, count):
        noise = 0.7 * noise + float(step)
        values.append(max(1.0, mean + noise))
    return values


def report_of(records: Sequence[RequestRecord], **more: object) -> BenchReport:
    """A report of these records."""
    facts: dict[str, object] = {"spec": {"concurrency": 8}, "endpoint": "127.0.0.1:8001", "model": "demo"}
    facts |= {"protocol": "grpc", "streaming": True, "tokens_counted_by": "output_ids"}
    facts |= {"prompts_sha256": "0" * 64, "started": "2026-01-01T00:00:00+00:00"}
    return BenchReport(records=tuple(records), **{**facts, **more})  # type: ignore[arg-type]

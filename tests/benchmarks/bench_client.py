"""The load generator of `trtserve bench`, against servers whose truth is known.

Run it on a quiet machine; the servers share it.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence

import numpy as np

from tests.benchmarks.frame import Row, benchmark_parser, finish, spread, table
from tests.support.bench_records import answered, correlated, report_of
from tests.support.echo_targets import echo_target, requests, target_at
from tests.support.exact_server import exact_server
from trtserve.bench.compare import compare
from trtserve.bench.echo_server import Echo, Spoken
from trtserve.bench.records import RequestRecord
from trtserve.bench.report import BenchReport
from trtserve.bench.statistics import Interval, mean_interval, percentile, t_quantile
from trtserve.bench.transport import LoadTarget
from trtserve.bench.worker import Load, LoadOutcome, run_load

RUNS = 1000
COMPARISONS = 120
TURNS = 4
SIMULATED = 1000


def send(
    target: LoadTarget,
    count: int,
    *,
    tokens: int = 16,
    rate: float | None = None,
    concurrency: int | None = None,
    workers: int = 1,
) -> LoadOutcome:
    """Send `count` requests, at a constant rate or in a closed loop."""
    sent = requests(count, tokens=tokens)
    offsets = None if rate is None else [index / rate for index in range(count)]
    load = Load(target=target, requests=sent, warmup=sent[:20], offsets=offsets, concurrency=concurrency, timeout=120)
    outcome = run_load(load, workers=workers)
    assert outcome is not None
    assert all(record.status == "completed" for record in outcome.records)
    return outcome


def latencies(records: list[RequestRecord]) -> list[float]:
    """Milliseconds from the intended send, sorted."""
    return sorted((record.ended_ns - record.intended_ns) / 1e6 for record in records)


def stall() -> list[Row]:
    """Frozen for 2 s; at 100 requests/s the share beyond t seconds is (2 - t) / 12, so that p90 is 0.8 s."""
    with echo_target(Echo(spoken="grpc-stream", chunks=1, stall_at=4.0, stall=2.0)) as target:
        records = send(target, 1200, rate=100, concurrency=32, tokens=1).records
    sent = sum(record.sent_ns is not None for record in records)
    error = abs(percentile(latencies(records), 0.9) / 800 - 1) * 100
    return [
        Row(case="Stall of 2 s, error of p90 from the intended send, %", value=error, target=10, at_most=True),
        Row(case="Stall of 2 s, requests sent of 1,200", value=sent, target=1200),
    ]


def known_latency() -> list[Row]:
    """A server of 50 ms and the load generator on a processor each, five runs."""
    rows = []
    for rate, limit in ((10, 0.5), (100, 0.5), (1000, 2.0)):
        runs = [latency_errors(rate) for _ in range(5)]
        for name, quantile in (("p50", 0.5), ("p99", 0.99)):
            found = [percentile(errors, quantile) for errors in runs]
            case = f"50 ms server at {rate:,} req/s, TTFT {name} error, ms"
            rows.append(spread(case, found, target=limit, at_most=True))
    return rows


def latency_errors(rate: int) -> list[float]:
    """Milliseconds between each answer's TTFT and what the answer took according to the server, sorted."""
    count = max(100, min(5000, rate * 10))
    ours, theirs, *_ = processors = sorted(os.sched_getaffinity(0))
    with exact_server(0.05, processor=theirs) as (port, taken):
        os.sched_setaffinity(0, {ours})
        records = send(target_at(Echo(spoken="http-stream"), port), count, rate=rate, tokens=1).records
        os.sched_setaffinity(0, processors)
        answers = zip(sorted(records, key=lambda record: record.sent_ns or 0), taken()[-count:], strict=True)
    return sorted((record.arrivals[0][0] - record.intended_ns - took) / 1e6 for record, took in answers)


def highest_rates() -> list[Row]:
    """Servers without latency, 16 separately flushed responses per answer; the best of three runs."""
    rows = []
    cases: tuple[tuple[Spoken, str, float], ...] = (
        ("grpc-stream", "gRPC stream", 1500),
        ("http-stream", "HTTP SSE", 5000),
    )
    for spoken, name, target_rate in cases:
        with echo_target(Echo(spoken=spoken)) as target:
            for workers in (1, 2):
                rates = []
                for _ in range(3):
                    records = send(target, 5000, concurrency=32, workers=workers).records
                    begin = min(record.sent_ns or 0 for record in records)
                    rates.append(len(records) / (max(record.ended_ns for record in records) - begin) * 1e9)
                goal = target_rate if workers == 2 else None
                case = f"{name}, {workers} worker{'s' if workers > 1 else ''}, answers/s"
                rows.append(Row(case=case, value=max(rates), target=goal))
    return rows


def coverage() -> list[Row]:
    """Intervals of 95 % on processes whose mean is known."""
    random = np.random.default_rng(7)

    def ar1() -> list[float]:
        value, values = float(random.normal()) / math.sqrt(1 - 0.81), []
        for step in random.normal(size=2000).tolist():
            value = 0.9 * value + step
            values.append(value)
        return values

    def queue() -> list[float]:
        """Times in the system of an M/M/1 queue at load 0.5, from its steady state."""
        count, load = 5000, 0.5
        services = random.exponential(1.0, count).tolist()
        gaps = random.exponential(1 / load, count).tolist()
        wait = 0.0 if random.random() > load else float(random.exponential(1 / (1 - load)))
        times = []
        for service, gap in zip(services, gaps, strict=True):
            times.append(wait + service)
            wait = max(0.0, wait + service - gap)
        return times

    rows = []
    for name, make, mean in (("AR(1)", ar1, 0.0), ("M/M/1", queue, 2.0)):
        runs = [make() for _ in range(RUNS)]
        for kind, interval in (("batch means", mean_interval), ("independent samples", independent_interval)):
            found = [interval(run) for run in runs]
            share = sum(each is not None and each[0] <= mean <= each[1] for each in found) / RUNS * 100
            goal = 93.0 if interval is mean_interval else None
            rows.append(Row(case=f"{name} covered, {kind}, %", value=share, target=goal))
    return rows


def comparisons() -> list[Row]:
    """A/A comparisons: how often a server is called worse than itself, by one run on each side and by several."""
    with echo_target(Echo(spoken="http-stream", chunks=8, delay=0.005, gap=0.001)) as target:
        runs = [measured(target, number) for number in range(2 * COMPARISONS)]
    random = np.random.default_rng(11)
    simulated = [drifting(random) for _ in range(SIMULATED)]
    cases = [
        ("one run on each side", [([before], [after]) for before, after in zip(runs[::2], runs[1::2], strict=True)]),
        (f"{TURNS} runs in turn", [in_turn(each) for each in batched(runs, 2 * TURNS)]),
        (f"{TURNS} runs in turn, simulated drift", [in_turn(each) for each in simulated]),
        ("one run on each side, simulated drift", [([each[0]], [each[1]]) for each in simulated]),
    ]
    return [alarms(f"A/A false alarms of {len(sides)}, {name}, %", sides) for name, sides in cases]


def alarms(case: str, sides: Sequence[tuple[list[BenchReport], list[BenchReport]]]) -> Row:
    """The share of comparisons in which some figure of a server got worse than its own."""
    worse = [any(each.worse_than(0.0) for each in compare(*both)) for both in sides]
    return Row(case=case, value=100 * sum(worse) / len(worse), target=5, at_most=True)


def measured(target: LoadTarget, number: int) -> BenchReport:
    """One run against a server, the `number`-th of its series."""
    started = f"2026-01-01T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}"
    return report_of(send(target, 200, concurrency=4, tokens=8).records, started=started)


def batched(runs: list[BenchReport], size: int) -> list[list[BenchReport]]:
    """The runs in whole groups of `size`."""
    return [runs[begin : begin + size] for begin in range(0, len(runs) - size + 1, size)]


def in_turn(runs: list[BenchReport]) -> tuple[list[BenchReport], list[BenchReport]]:
    """Both sides of runs that were made in the order A B B A A B B A."""
    return [*runs[::4], *runs[3::4]], [*runs[1::4], *runs[2::4]]


def drifting(random: np.random.Generator) -> list[BenchReport]:
    """Runs of one server on a machine whose speed wanders: 1 % from run to run, and 1 % of its own in each run."""
    runs, speed = [], 1.0
    for number in range(2 * TURNS):
        speed *= 1 + 0.01 * float(random.normal())
        slower = speed * (1 + 0.01 * float(random.normal()))
        times = correlated(64, seed=int(random.integers(2**31)))
        records = [
            answered(index, intended=index * 50, first=time * slower, step=5 * slower)
            for index, time in enumerate(times)
        ]
        runs.append(report_of(records, started=f"2026-01-01T00:00:{number:02}"))
    return runs


def independent_interval(values: Sequence[float]) -> Interval:
    """The textbook interval of a mean, which takes values as independent."""
    half = t_quantile(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def main() -> None:
    arguments = benchmark_parser(__doc__).parse_args()
    rows = [*stall(), *known_latency(), *highest_rates(), *coverage(), *comparisons()]
    print(table(rows, value="Measured"))
    print(f"\nMedian of the machine's load: {statistics.median(os.getloadavg()):.1f}")
    finish(arguments, "client", rows)


if __name__ == "__main__":
    main()

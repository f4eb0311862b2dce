"""How often is a served model called worse than itself? Comparisons of equal runs on a real server.

Run as `python -m tests.benchmarks.bench_repeats --work FOLDER --out FOLDER`. The demo is served by Triton and measured
again and again; each pair of neighbouring runs is compared, and each group of eight that took turns (A B B A A B B A).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.bench_client import TURNS, batched, in_turn
from tests.benchmarks.bench_protocols import CommandLine
from tests.benchmarks.results import Figure, benchmark_parser, finish
from trtserve.bench.compare import compare
from trtserve.bench.plan import plan_benchmark
from trtserve.bench.report import BenchReport
from trtserve.bench.run import run_benchmark
from trtserve.cli.endpoint import Connection, find_endpoint
from trtserve.specs import BenchSpec

COMPARISONS = 20
MOST_ALARMS = 5.0
SPEC = BenchSpec(
    traffic="token-norm-dist",
    num_requests=64,
    concurrency=2,
    input_mean=32,
    input_stdev=0,
    output_mean=16,
    output_stdev=0,
    calibrate=False,
)


def measured(home: Path) -> list[BenchReport]:
    """Serve the demo and measure it, as often as the comparisons need."""
    os.environ["TRTSERVE_HOME"] = str(home)
    with CommandLine(home).serving():
        plan = plan_benchmark(SPEC, find_endpoint(Connection()))
        return [run_benchmark(plan) for _ in range(2 * TURNS * COMPARISONS)]


def alarms(sides: Sequence[tuple[list[BenchReport], list[BenchReport]]]) -> float:
    """The share of comparisons in which some figure got worse, in per cent."""
    worse = [any(each.worse_than(0.0) for each in compare(*both)) for both in sides]
    return 100 * sum(worse) / len(worse)


def main() -> None:
    """Measure, print the shares, and write them as JSON."""
    arguments = benchmark_parser("repeats", __doc__).parse_args()
    runs = measured(arguments.work.absolute() / "repeats")
    cases = {
        "one run on each side": [([before], [after]) for before, after in batched(runs, 2)],
        f"{TURNS} runs on each side, in turn": [in_turn(each) for each in batched(runs, 2 * TURNS)],
    }
    figures = []
    for case, sides in cases.items():
        figures.append(Figure(case=case, value=alarms(sides), target=MOST_ALARMS, at_most=True))
        print(f"{len(sides)} comparisons, {case}: {figures[-1].value:.1f} % called worse (at most {MOST_ALARMS:g} %)")
    means = sorted(each.statistics.latency_ms.mean or 0.0 for each in runs)
    verdicts = Counter(each.verdict.judgement for each in runs)
    print(f"{len(runs)} runs, mean latency {means[0]:.1f} – {means[-1]:.1f} ms; verdicts: {dict(verdicts)}")
    report = {"cpus": os.cpu_count(), "figures": figures, "means_ms": means, "verdicts": verdicts}
    finish(arguments.out or arguments.work, "repeats", report, figures)


if __name__ == "__main__":
    main()

"""How often is a served model called worse than itself? Comparisons of equal runs on a real server.

The demo is served by Triton and measured again and again; each pair of neighbouring runs is compared, and each group of
eight that took turns (A B B A A B B A).
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from tests.benchmarks.bench_client import TURNS, alarms, batched, in_turn
from tests.benchmarks.bench_protocols import CommandLine
from tests.benchmarks.frame import benchmark_parser, finish, table
from trtserve.bench.plan import plan_benchmark
from trtserve.bench.report import BenchReport
from trtserve.bench.run import run_benchmark
from trtserve.cli.endpoint import Connection, find_endpoint
from trtserve.specs import BenchSpec

COMPARISONS = 20
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


def main() -> None:
    arguments = benchmark_parser(__doc__).parse_args()
    runs = measured(arguments.work / "repeats")
    rows = [
        alarms("one run on each side, %", [([before], [after]) for before, after in batched(runs, 2)]),
        alarms(f"{TURNS} runs on each side, in turn, %", [in_turn(each) for each in batched(runs, 2 * TURNS)]),
    ]
    print(table(rows, value="Called worse"))
    means = sorted(each.statistics.latency_ms.mean or 0.0 for each in runs)
    verdicts = Counter(each.verdict.judgement for each in runs)
    print(f"{len(runs)} runs, mean latency {means[0]:.1f} – {means[-1]:.1f} ms; verdicts: {dict(verdicts)}")
    finish(arguments, "repeats", rows, means_ms=means, verdicts=verdicts)


if __name__ == "__main__":
    main()

"""`make bench`: one benchmark after another, each in its own process; tables on stdout, JSON in the work folder."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.frame import MISSED
from trtserve.process import ProcessId, stop
from trtserve.process.signals import one_interrupt

ENDING = 30.0
"""Seconds that a benchmark has to end its servers after a signal."""
BENCHMARKS = (
    "cli",
    "client",
    "executor",
    "avx2",
    "precision",
    "features",
    "ngrams",
    "draft_model",
    "lora",
    "serving",
    "text",
    "endpoint",
    "gateway",
    "protocols",
    "repeats",
    "convert",
    "plan",
    "demo",
    "tune",
    "landscapes",
    "fleet",
    "strangers",
)


def run(line: list[str]) -> int:
    """Run a benchmark and return its exit code. When a signal ends us, it and all that it has started end too."""
    with one_interrupt(), subprocess.Popen(line) as benchmark:
        try:
            return benchmark.wait()
        except KeyboardInterrupt:
            if (identity := ProcessId.of(benchmark.pid)) is not None:
                stop(identity, grace=ENDING)
            raise


def main() -> int:
    """Run the chosen benchmarks; ends with 1 where one failed, else with MISSED where one missed a target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder that keeps models between runs")
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs of each comparison")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="only these; may be repeated")
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    results = work / "results"
    results.mkdir(parents=True, exist_ok=True)
    endings: dict[int, list[str]] = {}
    for name in arguments.only or BENCHMARKS:
        print(f"\n## {name} (load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} CPUs)\n", flush=True)
        module = f"tests.benchmarks.bench_{name}"
        options = ["--work", str(work), "--out", str(results), "--pairs", str(arguments.pairs)]
        code = run([sys.executable, "-m", module, *options])
        endings.setdefault(code if code in (0, MISSED) else 1, []).append(name)
    print(f"\nFigures: {results}")
    for code, words in ((MISSED, "Missed a target"), (1, "Failed")):
        if code in endings:
            print(f"{words}: {', '.join(endings[code])}")
    return next((code for code in (1, MISSED) if code in endings), 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""`make bench`: one benchmark after another, each in its own process; tables on stdout, JSON in the work folder."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("cli", "executor", "precision", "features", "lora", "serving", "text", "convert", "plan", "demo")


def main() -> int:
    """Run the chosen benchmarks; the exit code says whether all of them came to their end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder that keeps models between runs")
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs of each comparison")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="only these; may be repeated")
    arguments = parser.parse_args()
    work = arguments.work.absolute()
    results = work / "results"
    results.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.only or BENCHMARKS:
        print(f"\n## {name} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs)\n", flush=True)
        module = f"tests.benchmarks.bench_{name}"
        options = ["--work", str(work), "--out", str(results), "--pairs", str(arguments.pairs)]
        if subprocess.run([sys.executable, "-m", module, *options], check=False).returncode != 0:
            failed.append(name)
    print(f"\nFigures: {results}")
    if failed:
        print(f"Failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())

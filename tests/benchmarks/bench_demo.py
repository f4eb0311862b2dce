"""Wall time of `make demo` in a fresh clone, its environment included; the package cache is as it is found."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from tests.benchmarks.frame import Row, benchmark_parser, environment, finish, table

ROOT = Path(__file__).parents[2]
TARGET = 180.0
TIMEOUT = 1200.0


def measure(work: Path) -> float:
    """Return the seconds of `make demo` in a clone of the last commit; the first run fills the package cache."""
    clone = work / "clone"
    shutil.rmtree(clone, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=TIMEOUT)
    variables = {name: value for name, value in environment().items() if not name.startswith("TRTSERVE_")}
    begin = time.perf_counter()
    result = subprocess.run(
        ["make", "demo"], cwd=clone, env=variables, capture_output=True, text=True, check=True, timeout=TIMEOUT
    )
    elapsed = time.perf_counter() - begin
    assert "Machine learning is " in result.stdout, result.stdout
    shutil.rmtree(clone)
    return elapsed


def main() -> None:
    arguments = benchmark_parser(__doc__).parse_args()
    rows = [
        Row(case="`make demo`, fresh clone", value=measure(arguments.work)),
        Row(case="… again, warm package cache", value=measure(arguments.work), target=TARGET, at_most=True),
    ]
    print(table(rows, value="Seconds"))
    finish(arguments, "demo", rows)


if __name__ == "__main__":
    main()

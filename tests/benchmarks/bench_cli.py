"""The cost of the command line: `trtserve --help`, and `trtserve query` compared with a bare tritonclient script.

Run as `python -m tests.benchmarks.bench_cli --out FOLDER`. Both sides are whole processes that ask a real Triton, whose
model echoes the prompt without any work, so that the difference is the command line's own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.processes import environment
from tests.benchmarks.results import Figure, finish
from tests.support.echo_server import running_echo_server

TRTSERVE = [str(Path(sys.executable).parent / "trtserve")]
TIMEOUT = 60.0

# The shortest program that gets a streamed answer with tritonclient.
BARE_CLIENT = """
import queue, sys
import numpy as np
import tritonclient.grpc as triton

def tensor(name, kind, values):
    made = triton.InferInput(name, [1, 1], kind)
    made.set_data_from_numpy(values)
    return made

answers = queue.Queue()
client = triton.InferenceServerClient(sys.argv[1])
client.start_stream(lambda result, error: answers.put((result, error)))
client.async_stream_infer(
    "echo",
    [
        tensor("text_input", "BYTES", np.array([[b"What is ML?"]], np.object_)),
        tensor("max_tokens", "INT32", np.array([[256]], np.int32)),
    ],
)
result, error = answers.get(timeout=30)
assert error is None, error
print(result.as_numpy("text_output")[0].decode().strip())
client.stop_stream()
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Median, lowest and highest in seconds."""

    case: str
    runs: int
    seconds: float
    lowest: float
    highest: float
    target: float


def seconds(command: Sequence[str], expected: str) -> float:
    """Return the wall time of a process, which must print `expected`."""
    begin = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT, env=environment())
    elapsed = time.perf_counter() - begin
    assert expected in result.stdout, result.stdout
    return elapsed


def measure_help(runs: int) -> Row:
    """Wall time of `trtserve --help`; the first run warms the file cache."""
    times = [seconds([*TRTSERVE, "--help"], "Usage") for _ in range(runs + 1)][1:]
    return _row("`trtserve --help`", times, target=0.25)


def measure_query(runs: int) -> Row:
    """`trtserve query` minus the bare client, pair by pair; whoever begins changes from pair to pair."""
    with tempfile.TemporaryDirectory() as folder, running_echo_server(Path(folder)) as server:
        query = [*TRTSERVE, "query", "What is ML?", "--model", "echo", "--url", server.grpc]
        bare = [sys.executable, "-c", BARE_CLIENT, server.grpc]
        differences = []
        for number in range(runs + 1):
            taken: dict[str, float] = {}
            for name, command in (("query", query), ("bare", bare))[:: 1 if number % 2 else -1]:
                taken[name] = seconds(command, "Echo: What is ML?")
            differences.append(taken["query"] - taken["bare"])
    return _row("`trtserve query` − bare tritonclient", differences[1:], target=0.3)


def _row(case: str, times: Sequence[float], *, target: float) -> Row:
    return Row(
        case=case,
        runs=len(times),
        seconds=statistics.median(times),
        lowest=min(times),
        highest=max(times),
        target=target,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| Case | Median, s | Lowest … highest, s | Target, s | Runs |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {row.case} | {row.seconds:.2f} | {row.lowest:.2f} … {row.highest:.2f} | ≤ {row.target:.2f} | {row.runs} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder for cli.json without --out")
    parser.add_argument("--out", type=Path, help="folder for cli.json; default: the work folder")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    rows = [measure_help(arguments.pairs), measure_query(arguments.pairs)]
    print(table(rows))
    figures = [Figure(case=row.case, value=row.seconds, target=row.target, at_most=True) for row in rows]
    finish(arguments.out or arguments.work, "cli", {"rows": rows}, figures)


if __name__ == "__main__":
    main()

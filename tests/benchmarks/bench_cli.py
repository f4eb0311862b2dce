"""The cost of the command line: `trtserve --help`, and `trtserve query` compared with a bare tritonclient script.

Both sides are whole processes that ask a real Triton, whose model echoes the prompt without any work, so that the
difference is the command line's own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.frame import Row, benchmark_parser, compare, environment, finish, spread, table
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


def seconds(command: Sequence[str], expected: str) -> float:
    """Return the wall time of a process, which must print `expected`."""
    begin = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT, env=environment())
    elapsed = time.perf_counter() - begin
    assert expected in result.stdout, result.stdout
    return elapsed


def measure_query(pairs: int) -> Row:
    """Return what `trtserve query` adds to the bare client."""
    with tempfile.TemporaryDirectory() as folder, running_echo_server(Path(folder)) as server:
        query = [*TRTSERVE, "query", "What is ML?", "--model", "echo", "--url", server.grpc]
        bare = [sys.executable, "-c", BARE_CLIENT, server.grpc]
        return compare(
            "`trtserve query` − bare tritonclient",
            lambda _: seconds(query, "Echo: What is ML?"),
            lambda _: seconds(bare, "Echo: What is ML?"),
            pairs=pairs,
            difference=True,
            target=0.3,
            at_most=True,
        )


def main() -> None:
    arguments = benchmark_parser(__doc__).parse_args()
    # The first run warms the file cache.
    times = [seconds([*TRTSERVE, "--help"], "Usage") for _ in range(arguments.pairs + 1)][1:]
    rows = [spread("`trtserve --help`", times, target=0.25, at_most=True), measure_query(arguments.pairs)]
    print(table(rows, measured="query, s", base="Bare client, s", value="Median, s"))
    finish(arguments, "cli", rows)


if __name__ == "__main__":
    main()

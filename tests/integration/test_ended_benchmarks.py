"""A benchmark that a signal ends while it serves: nothing of its server is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.commands import environment
from tests.support.waiting import wait_until
from trtserve.process import ProcessId, tree
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.server.triton.tritonserver import shared_memory_regions

BENCHMARK = """
    import sys, time
    from pathlib import Path
    from tests.support.servers import running_server

    repository, home = map(Path, sys.argv[1:])
    with running_server(repository, home=home) as server:
        print(server.instances[0].process.pid, server.shm_prefix, flush=True)
        time.sleep(600)
"""
RUNNER = """
    import sys
    from tests.benchmarks.__main__ import run

    sys.exit(run([sys.executable, *sys.argv[1:]]))
"""


@pytest.mark.triton
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_with_its_benchmark(number: signal.Signals, tmp_path: Path) -> None:
    repository = write_probe_repository(tmp_path / "probe")
    runner, benchmark = textwrap.dedent(RUNNER), textwrap.dedent(BENCHMARK)
    line = [sys.executable, "-c", runner, "-c", benchmark, str(repository), str(tmp_path / "home")]
    with subprocess.Popen(
        line,
        env=environment(tmp_path / "home"),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid, prefix = process.stdout.readline().split()
        triton = ProcessId.of(int(pid))
        assert triton is not None
        members = tree(triton)
        os.kill(process.pid, number)
        assert process.wait(60) != 0
    wait_until(lambda: not any(each.alive() for each in (triton, *members)))
    assert shared_memory_regions(prefix) == []

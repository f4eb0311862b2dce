"""A clock that jumps, a damaged state file, a server that hangs."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.commands import environment
from tests.support.supervised import ALL, slow_model, supervised
from tests.support.waiting import wait_until
from trtserve.errors import MachineError
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.server.state import state_file
from trtserve.server.triton.tritonserver import shared_memory_regions

pytestmark = pytest.mark.triton


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_probe_repository(tmp_path / "probe")


def clock_moved(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run trtserve as it runs after the clock was set forward by a day: the time of day and that of the boot differ."""
    program = textwrap.dedent("""
        import psutil, sys, time
        day, now, boot = 86400, time.time, psutil.boot_time()
        time.time = lambda: now() + day
        psutil._pslinux.boot_time = lambda: boot + day
        psutil._pslinux.BOOT_TIME = boot + day
        from trtserve.__main__ import main
        main()
    """)
    line = [sys.executable, "-c", program, *arguments]
    environment = {"TRTSERVE_HOME": str(home), "PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin"}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_clock_that_jumps(repository: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with supervised(repository, home) as one:
        one.ready()
        status = clock_moved("status", one.name, home=home)
        assert status.returncode == 0, status.stderr
        stopped = clock_moved("stop", one.name, home=home)
        assert (stopped.returncode, stopped.stdout) == (0, f"{one.name}\n"), stopped.stderr


@pytest.mark.parametrize("damage", ["{", "", None] if ALL else ["{"])
def test_a_damaged_state_file_is_written_again(damage: str | None, repository: Path, tmp_path: Path) -> None:
    with supervised(repository, tmp_path / "home") as one:
        server = one.ready()
        path = state_file(one.name, one.store)
        if damage is None:
            path.unlink()
        else:
            path.write_text(damage)
        line = [sys.executable, "-m", "trtserve", "status"]
        told = subprocess.run(line, env=environment(tmp_path / "home"), capture_output=True, text=True, check=False)
        assert (told.returncode, one.name in told.stdout) == (0, True), told.stderr
        assert one.record().instances == server.instances


def test_a_hanging_server_is_degraded_and_recovers(repository: Path, tmp_path: Path) -> None:
    with supervised(repository, tmp_path / "home") as one:
        server = one.ready()
        os.kill(server.instances[0].process.pid, signal.SIGSTOP)
        wait_until(lambda: one.record().state == "degraded")
        assert "does not report it as ready" in one.record().reason
        os.kill(server.instances[0].process.pid, signal.SIGCONT)
        wait_until(lambda: one.record().state == "ready")
        assert one.ask() == 200


def test_other_users_can_read_nothing_of_a_server(repository: Path, tmp_path: Path) -> None:
    slow_model(repository, 2.0)
    with supervised(repository, tmp_path / "home", gateway=True) as one:
        server = one.ready()
        log = server.instances[0].log
        regions = shared_memory_regions(server.shm_prefix)
        assert regions
        files = [path for path in log.parent.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
        assert {log, state_file(one.name, one.store)} <= set(files)
        assert [str(path) for path in (*regions, *files) if path.stat().st_mode & 0o077] == []
        for each in (server.instances[0].process.pid, one.victim("probe"), one.victim("gateway")):
            assert "Umask:\t0077" in Path(f"/proc/{each}/status").read_text()


@pytest.mark.parametrize("process", ["supervisor", "tritonserver", "probe"] if ALL else ["supervisor"])
def test_a_process_without_file_descriptors(process: str, repository: Path, tmp_path: Path) -> None:
    with supervised(repository, tmp_path / "home", "--restart", "on-failure", gateway=True) as one:
        one.ready()
        pid = one.victim(process)
        wait_until(lambda: one.ask() == 200)
        time.sleep(3)  # what a start still reads
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        answers = []
        for _ in range(6):
            time.sleep(1)
            answers.append(one.ask())
        assert answers == [200] * 6
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        wait_until(lambda: one.record().state == "ready")
        assert one.record().restarts == 0


def test_a_start_without_file_descriptors(repository: Path, tmp_path: Path) -> None:
    line = f"ulimit -n 8; exec {sys.executable} -m trtserve start --auto-ports --model-repository {repository}"
    told = subprocess.run(
        ["bash", "-c", line], env=environment(tmp_path / "home"), capture_output=True, text=True, check=False
    )
    assert told.returncode == MachineError.code
    assert "too many files are open (this process may have 8)" in told.stderr

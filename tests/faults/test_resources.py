"""A clock that jumps, a damaged state file, a server that hangs."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import environment
from tests.support.supervised import ALL, Supervised, slow_model, supervised
from tests.support.waiting import wait_until
from trtserve.errors import MachineError
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.server.state import state_file
from trtserve.server.triton.tritonserver import shared_memory_regions

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_probe_repository(tmp_path / "probe")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Iterator[Supervised]:
    """A server that is never started again, so that a failure in one test fails the others too."""
    repository = write_probe_repository(tmp_path_factory.mktemp("kept") / "probe")
    slow_model(repository, 2.0)
    with supervised(repository, home, gateway=True) as one:
        one.ready()
        yield one


@pytest.mark.parametrize("damage", ["{", "", None] if ALL else ["{"])
def test_a_damaged_state_file_is_written_again(damage: str | None, one: Supervised, home: Path) -> None:
    server = one.record()
    path = state_file(one.name, one.store)
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage)
    line = [sys.executable, "-m", "trtserve", "status"]
    told = subprocess.run(line, env=environment(home), capture_output=True, text=True, check=False)
    assert (told.returncode, one.name in told.stdout) == (0, True), told.stderr
    assert one.record().instances == server.instances


def test_a_hanging_server_is_degraded_and_recovers(one: Supervised) -> None:
    server = one.record()
    os.kill(server.instances[0].process.pid, signal.SIGSTOP)
    wait_until(lambda: one.record().state == "degraded")
    assert "does not report it as ready" in one.record().reason
    os.kill(server.instances[0].process.pid, signal.SIGCONT)
    wait_until(lambda: one.record().state == "ready")
    wait_until(lambda: one.ask() == 200)  # the gateway looks for itself


def test_other_users_can_read_nothing_of_a_server(one: Supervised) -> None:
    server = one.record()
    log = server.instances[0].log
    regions = shared_memory_regions(server.shm_prefix)
    assert regions
    files = [path for path in log.parent.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    assert {log, state_file(one.name, one.store)} <= set(files)
    assert [str(path) for path in (*regions, *files) if path.stat().st_mode & 0o077] == []
    for each in (server.instances[0].process.pid, one.victim("probe"), one.victim("gateway")):
        assert "Umask:\t0077" in Path(f"/proc/{each}/status").read_text()


@pytest.mark.parametrize("process", ["supervisor", "tritonserver", "probe"] if ALL else ["supervisor"])
def test_a_process_without_file_descriptors(process: str, one: Supervised) -> None:
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


def test_a_clock_that_jumps(one: Supervised, home: Path) -> None:
    """It stops the server that the tests above share."""
    status = clock_moved("status", one.name, home=home)
    assert status.returncode == 0, status.stderr
    stopped = clock_moved("stop", one.name, home=home)
    assert (stopped.returncode, stopped.stdout) == (0, f"{one.name}\n"), stopped.stderr


# A model that takes as much memory as it is asked for, and gives it back.
TAKES = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            size = int(pb_utils.get_input_tensor_by_name(request, "BYTES").as_numpy()[0])
            taken = np.ones(size, np.int8)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("TAKEN", np.array([taken.size]))]))
        return answers
"""
_LARGE = 1 << 26
TENSOR = '{ name: "%s" data_type: TYPE_INT64 dims: [1] }'


@pytest.fixture(scope="module")
def taking(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Iterator[Supervised]:
    """A server with the model `takes`, whose gateway may be started again."""
    repository = write_probe_repository(tmp_path_factory.mktemp("taking") / "probe")
    version = repository / "takes" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(TAKES)
    tensors = f"input [{TENSOR % 'BYTES'}]\noutput [{TENSOR % 'TAKEN'}]\n"
    (repository / "takes" / "config.pbtxt").write_text(f'name: "takes"\nbackend: "python"\n{tensors}')
    with supervised(repository, home, "--restart", "on-failure", gateway=True) as taking:
        taking.ready()
        yield taking


@pytest.mark.parametrize("process", ["takes", "gateway"])
def test_a_process_without_memory(process: str, taking: Supervised) -> None:
    def take(size: int, padding: int = 0) -> int:
        tensor = {"name": "BYTES", "shape": [1], "datatype": "INT64", "data": [size]}
        return taking.post("/v2/models/takes/infer", {"inputs": [tensor], "parameters": {"x": "x" * padding}})

    wait_until(lambda: take(_LARGE) == 200)
    restarts = taking.record().restarts
    pid = taking.victim(process)
    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (used + _LARGE // 4, resource.RLIM_INFINITY))
    if process == "takes":
        assert [take(_LARGE), take(1), take(_LARGE)] == [500, 200, 500]
    else:
        assert take(1, padding=_LARGE) in (0, 500, 503)
    with contextlib.suppress(ProcessLookupError):  # it may have ended
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_until(lambda: take(_LARGE) == 200)
    wait_until(lambda: taking.record().state == "ready")
    assert process == "gateway" or taking.record().restarts == restarts


def test_a_start_without_file_descriptors(repository: Path, tmp_path: Path) -> None:
    line = f"ulimit -n 8; exec {sys.executable} -m trtserve start --auto-ports --model-repository {repository}"
    told = subprocess.run(
        ["bash", "-c", line], env=environment(tmp_path / "home"), capture_output=True, text=True, check=False
    )
    assert told.returncode == MachineError.code
    assert "too many files are open (this process may have 8)" in told.stderr


@pytest.mark.parametrize("detached", [(), ("--detach",)], ids=["foreground", "detached"])
def test_a_start_with_too_few_file_descriptors_for_triton(
    detached: tuple[str, ...], repository: Path, tmp_path: Path
) -> None:
    command = shlex.join([sys.executable, "-m", "trtserve", "start", "--auto-ports", *detached])
    line = f"ulimit -n 32; exec {command} --model-repository {repository}"
    told = subprocess.run(
        ["bash", "-c", line], env=environment(tmp_path / "home"), capture_output=True, text=True, check=False
    )
    assert told.returncode == MachineError.code
    assert "a process may open 32 (ulimit -n), and Triton needs 128" in told.stderr
    assert "Starting Triton" not in told.stderr

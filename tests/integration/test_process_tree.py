"""Real processes: commands as a shell runs them; trees that are started in their own session and ended whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.support.waiting import eventually, wait_until
from trtserve.errors import MissingDependencyError, ServerStopError
from trtserve.gateway.standstill import python_stubs
from trtserve.host.machine import SHARED_MEMORY
from trtserve.process import Command, ProcessId, exit_code, halts, kill_group, run, spawn, stop, tree
from trtserve.progress import SILENT
from trtserve.server import supervision
from trtserve.store import Store

SLEEP = "import time; time.sleep(60)"
# A child in its own session, as mpirun's daemons make; its pid is written once it runs.
PARENT = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
print(*(subprocess.Popen(sleeper, start_new_session=own).pid for own in {sessions}), flush=True)
{then}
"""


def python(code: str, log: Path) -> ProcessId:
    return spawn(Command(argv=(sys.executable, "-c", code)), log=log)


def parent(log: Path, *, sessions: tuple[bool, ...], then: str = "time.sleep(60)") -> tuple[ProcessId, set[int]]:
    identity = python(PARENT.format(sessions=sessions, then=then), log)
    assert eventually(lambda: log.read_text().endswith("\n"))
    return identity, {int(pid) for pid in log.read_text().split()}


def test_output_goes_to_the_log_and_the_code_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "folder" / "log"
    identity = python("import sys, os; print(os.getsid(0)); sys.stderr.write('oops'); sys.exit(7)", log)
    assert eventually(lambda: not identity.alive())
    assert exit_code(identity) == 7
    assert log.read_text() == f"{identity.pid}\noops"


def test_stop_reaches_children_in_other_sessions(tmp_path: Path) -> None:
    identity, pids = parent(tmp_path / "log", sessions=(True, False))
    members = tree(identity)
    assert {member.pid for member in members} == pids
    assert stop(identity, grace=5)
    assert not any(member.alive() for member in (identity, *members))


def test_children_of_a_dead_leader_are_found_by_their_session(tmp_path: Path) -> None:
    identity, pids = parent(tmp_path / "log", sessions=(False,), then="sys.exit()")
    assert eventually(lambda: not identity.alive())
    members = tree(identity)
    assert {member.pid for member in members} == pids
    assert stop(identity, grace=5)
    assert not tree(identity)


def test_term_lets_the_process_end_in_order(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(4))\nprint('up', flush=True)\ntime.sleep(60)"
    )
    identity = python(code, tmp_path / "log")
    assert eventually(lambda: (tmp_path / "log").read_text() == "up\n")
    assert stop(identity, grace=10)
    assert exit_code(identity) == 4


@pytest.mark.parametrize(("grace", "urgent"), [(0.2, False), (3600.0, True)])
def test_a_process_that_ignores_term_is_killed(tmp_path: Path, grace: float, urgent: bool) -> None:
    code = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    identity = python(code, tmp_path / "log")
    assert eventually(lambda: (tmp_path / "log").read_text() == "up\n")
    assert stop(identity, grace=grace, urgent=lambda: urgent)
    assert exit_code(identity) == -signal.SIGKILL


SHARES = """
import signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(SharedMemory(create=True, size=4096).name, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", [lambda one: stop(one, grace=0.1), lambda one: kill_group(one.pid)])
def test_shared_memory_of_killed_python_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[ProcessId], object]
) -> None:
    """Python's resource tracker, a process of its own, removes what the others leave."""
    monkeypatch.setattr("trtserve.process._TRACKED", 60.0)  # it gets little time on a busy machine
    log = tmp_path / "log"
    identity = python(SHARES, log)
    wait_until(lambda: log.read_text().endswith("\n"))
    region = SHARED_MEMORY / log.read_text().strip()
    assert region.exists()
    end(identity)
    wait_until(lambda: not identity.alive())
    assert not region.exists()
    assert not tree(identity)


def test_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    identity = python(SLEEP, tmp_path / "log")
    stale = ProcessId(pid=identity.pid, started=identity.started - 60)
    assert not tree(stale)
    assert stop(stale, grace=0.1)
    assert identity.alive()
    os.kill(identity.pid, signal.SIGKILL)
    assert eventually(lambda: not identity.alive())


# What starts a process and is killed then; the thread ends before.
KILLED = """
import sys, threading, time
from pathlib import Path
from trtserve.process import Command, spawn
def start():
    command = Command(argv=(sys.executable, "-c", "import time; time.sleep(60)"))
    sleeper = spawn(command, log=Path(sys.argv[1]), bound={bound})
    print(sleeper.pid, flush=True)
{run}
time.sleep(60)
"""
IN_A_THREAD = "thread = threading.Thread(target=start); thread.start(); thread.join()"


@pytest.mark.parametrize(
    ("bound", "run", "survives"),
    [(True, "start()", False), (False, "start()", True), (True, IN_A_THREAD, True)],
    ids=["bound", "free", "bound in a thread"],
)
def test_a_bound_child_ends_with_its_killed_parent(bound: bool, run: str, survives: bool, tmp_path: Path) -> None:
    code = KILLED.format(bound=bound, run=run)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        sleeper = ProcessId.of(int(one.stdout.readline()))
        assert sleeper is not None
        time.sleep(0.1)
        assert sleeper.alive()
        one.kill()
    assert eventually(lambda: not sleeper.alive(), 0.5 if survives else 60) is not survives
    stop(sleeper, grace=0)


def test_command_prints_as_a_shell_line_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    command = Command(argv=("sh", "-c", 'echo "$GREETING" from "$PWD"'), env={"GREETING": "it's"}, cwd=folder)
    shown = subprocess.run(["sh", "-c", str(command)], capture_output=True, text=True, check=True).stdout
    assert shown == f"it's from {folder}\n"
    assert run(command, timeout=60).stdout == shown


def test_program_is_looked_up_on_the_path_of_the_process(tmp_path: Path) -> None:
    program = tmp_path / "greet"
    program.write_text("#!/bin/sh\necho hello; echo oops >&2; exit 3\n")
    program.chmod(0o755)
    ended = run(Command(argv=("greet",), env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}), timeout=60)
    assert (ended.code, ended.stdout, ended.stderr) == (3, "hello\n", "oops\n")
    with pytest.raises(MissingDependencyError, match="greet was not found"):
        run(Command(argv=("greet",)), timeout=60)


def test_run_is_bounded() -> None:
    with pytest.raises(TimeoutError, match=r"sleep did not end within 0\.1 s"):
        run(Command(argv=("sleep", "60")), timeout=0.1)


def test_a_process_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = spawn(Command(argv=("sleep", "60")), log=tmp_path / "log")
    wait_until(lambda: psutil.Process(other.pid).cmdline())  # it has none while it becomes the program

    def refused(process: psutil.Process, number: int) -> None:
        raise psutil.AccessDenied(process.pid)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(psutil.Process, "send_signal", refused)
            with pytest.raises(
                ServerStopError, match=rf"Process {other.pid} \(\S*sleep 60\) cannot be stopped: it belongs to \w+"
            ):
                stop(other, grace=1)
    finally:
        assert stop(other, grace=1)


def test_a_fork_of_a_stub_is_no_stub(tmp_path: Path) -> None:
    program = tmp_path / "demo" / "1" / "model.py"
    program.parent.mkdir(parents=True)
    program.write_text("exec 3<&0; (read line <&3; true) & echo forked; wait\n")
    words = ("triton_python_backend_stub", str(program))
    myself = ProcessId.of(os.getpid())
    assert myself is not None
    with subprocess.Popen(words, executable="/bin/sh", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stub:
        assert stub.stdout is not None
        stub.stdout.readline()
        (fork,) = psutil.Process(stub.pid).children()
        found = {each.pid: model for each, model in python_stubs(myself).items()}  # other tests' servers run, too
        assert stub.stdin is not None
        stub.stdin.close()
    assert (found.get(stub.pid), fork.pid in found) == ("demo", False)


def test_a_helper_that_a_signal_stops_is_killed_before_health_would_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [100.0]
    for module in (supervision, halts):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(supervision, "named_parts", lambda _: {})
    script = "read line; sleep 60 & echo $!; wait"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as part:
        try:
            server: Any = SimpleNamespace(name="demo", instances=(), gateways=(), roots=[ProcessId.of(part.pid)])
            watchman = supervision.Watchman(server, Store(tmp_path), SILENT)
            watchman.standing(thoroughly=True)  # before the helper is there
            assert part.stdin is not None
            assert part.stdout is not None
            part.stdin.write(b"go\n")
            part.stdin.flush()
            helper = ProcessId.of(int(part.stdout.readline()))
            assert helper is not None
            os.kill(helper.pid, signal.SIGSTOP)
            wait_until(helper.halted)
            while helper.alive():
                assert seconds[0] < 105
                seconds[0] += supervision._INTERVAL
                watchman.standing(thoroughly=seconds[0] % supervision._PROBE == 0)
        finally:
            os.killpg(part.pid, signal.SIGKILL)

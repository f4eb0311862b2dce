"""Commands as a shell runs them, and processes of others."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from trtserve.errors import MissingDependencyError, ServerStopError
from trtserve.process import Command, run, spawn, stop


def test_command_prints_as_a_shell_line_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    command = Command(argv=("sh", "-c", 'echo "$GREETING" from "$PWD"'), env={"GREETING": "it's"}, cwd=folder)
    shown = subprocess.run(["sh", "-c", str(command)], capture_output=True, text=True, check=True).stdout
    assert shown == f"it's from {folder}\n"
    assert run(command, timeout=10).stdout == shown


def test_program_is_looked_up_on_the_path_of_the_process(tmp_path: Path) -> None:
    program = tmp_path / "greet"
    program.write_text("#!/bin/sh\necho hello; echo oops >&2; exit 3\n")
    program.chmod(0o755)
    ended = run(Command(argv=("greet",), env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}), timeout=10)
    assert (ended.code, ended.stdout, ended.stderr) == (3, "hello\n", "oops\n")
    with pytest.raises(MissingDependencyError, match="greet was not found"):
        run(Command(argv=("greet",)), timeout=10)


def test_run_is_bounded() -> None:
    with pytest.raises(TimeoutError, match=r"sleep did not end within 0\.1 s"):
        run(Command(argv=("sleep", "60")), timeout=0.1)


def test_a_process_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = spawn(Command(argv=("sleep", "60")), log=tmp_path / "log")

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

"""Commands as values, identities, and signals that are counted instead of obeyed."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from trtserve import process
from trtserve.errors import MissingDependencyError, ServerStopError
from trtserve.interrupts import held_back, one_interrupt, stop_signals
from trtserve.process import Command, Identity, describe, run, spawn, stop


def test_command_prints_as_a_shell_line_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    command = Command(argv=("sh", "-c", 'echo "$GREETING" from "$PWD"'), env={"GREETING": "it's"}, cwd=folder)
    shown = subprocess.run(["sh", "-c", str(command)], capture_output=True, text=True, check=True).stdout
    assert shown == f"it's from {folder}\n"
    assert run(command, timeout=10).stdout == shown


def test_command_without_environment_or_folder_is_the_bare_line() -> None:
    assert str(Command(argv=("echo", "a b"))) == "echo 'a b'"


def test_environment_is_laid_over_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    assert {"KEPT": "1", "NEW": "2"}.items() <= Command(argv=("x",), env={"NEW": "2"}).environment.items()


def test_program_is_looked_up_on_the_path_of_the_process(tmp_path: Path) -> None:
    program = tmp_path / "greet"
    program.write_text("#!/bin/sh\necho hello; echo oops >&2; exit 3\n")
    program.chmod(0o755)
    ended = run(Command(argv=("greet",), env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}), timeout=10)
    assert (ended.code, ended.stdout, ended.stderr) == (3, "hello\n", "oops\n")
    with pytest.raises(MissingDependencyError, match="greet was not found"):
        run(Command(argv=("greet",)), timeout=10)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["sleep", "60"], "sleep 60"),
        (["/opt/" + "x" * 90 + "/bin/tritonserver", "--id=1"], "…/tritonserver --id=1"),
        (["/usr/bin/" + "p" * 20, "--x=" + "y" * 90], f"/usr/bin/{'p' * 20} --x={'y' * 45}…"),
        (["n" * 90, "z"], f"{'n' * 90}…"),
        ([], ""),
    ],
)
def test_names_of_programs_stay_whole(words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "arguments", lambda _: words)
    assert describe(Identity(pid=1, started=0.0)) == shown


def test_run_is_bounded() -> None:
    with pytest.raises(TimeoutError, match=r"sleep did not end within 0\.1 s"):
        run(Command(argv=("sleep", "60")), timeout=0.1)


def test_identity_of_a_reused_pid_is_another_process() -> None:
    own = Identity.of(os.getpid())
    assert own is not None
    assert own.alive()
    assert not Identity(pid=own.pid, started=own.started - 60).alive()
    assert own.matches(Identity(pid=own.pid, started=own.started + 0.01))


def test_identity_of_a_pid_that_nobody_has() -> None:
    assert Identity.of(2**22 + 1) is None
    assert not Identity(pid=2**22 + 1, started=0.0).alive()


def test_signals_are_counted_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as signals:
        assert signals() == 0
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals() == 2
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupts_do_not_disturb_what_clears_away(first: signal.Signals) -> None:
    before, cleared = signal.getsignal(first), list[int]()

    def clear() -> None:
        with suppress(OSError):
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.raise_signal(number)
                cleared.append(number)
            try:
                raise FileNotFoundError
            finally:
                signal.raise_signal(signal.SIGINT)
                cleared.append(0)

    def work() -> None:
        with ExitStack() as stack:
            stack.callback(clear)
            try:
                signal.raise_signal(first)
            finally:
                clear()

    with one_interrupt() as received:
        before_any = received()
        with pytest.raises(KeyboardInterrupt):
            work()
        assert (before_any, received()) == (None, first)
    assert len(cleared) == 8
    assert signal.getsignal(first) is before


def test_an_interrupt_that_was_lost_can_be_given_again() -> None:
    with one_interrupt():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def test_other_threads_count_no_signals() -> None:
    counts: list[int] = []

    def count() -> None:
        with stop_signals() as signals:
            counts.append(signals())

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    assert counts == [0]


@pytest.mark.parametrize("given", [(signal.SIGTERM, signal.SIGINT), ()])
def test_an_interrupt_names_the_first_signal_that_was_counted(given: tuple[signal.Signals, ...]) -> None:
    def work() -> None:
        with stop_signals() as signals:
            for number in given:
                signal.raise_signal(number)
            assert signals() == len(given)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert getattr(caught.value, "number", None) == next(iter(given), None)


def test_signals_that_are_held_back_come_afterwards() -> None:
    done: list[str] = []

    def work() -> None:
        with one_interrupt(), held_back():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals() == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_of_somebody_else_is_not_ours_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = spawn(Command(argv=("sleep", "60")), log=tmp_path / "log")

    def refused(process: psutil.Process, number: int) -> None:
        raise psutil.AccessDenied(process.pid)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(psutil.Process, "send_signal", refused)
            with pytest.raises(
                ServerStopError, match=rf"Process {other.pid} \(\S*sleep 60\) is not ours .* belongs to \w+"
            ):
                stop(other, grace=1)
    finally:
        assert stop(other, grace=1)

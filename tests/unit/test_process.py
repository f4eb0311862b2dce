"""Commands as values, identities, and signals that are counted instead of obeyed."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import types
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from trtserve import process
from trtserve.process import Command, ProcessId, describe
from trtserve.process.signals import held_back, one_interrupt, stop_signals


def test_command_without_environment_or_folder_is_the_bare_line() -> None:
    assert str(Command(argv=("echo", "a b"))) == "echo 'a b'"


def test_a_commands_environment_extends_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    assert {"KEPT": "1", "NEW": "2"}.items() <= Command(argv=("x",), env={"NEW": "2"}).environment.items()


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
def test_a_shortened_command_keeps_the_programs_name(
    words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "arguments", lambda _: words)
    assert describe(ProcessId(pid=1, started=0.0)) == shown


def test_identity_of_a_reused_pid_is_another_process() -> None:
    own = ProcessId.of(os.getpid())
    assert own is not None
    assert own.alive()
    assert not ProcessId(pid=own.pid, started=own.started - 60).alive()
    assert own.matches(ProcessId(pid=own.pid, started=own.started))


def test_a_free_pid_has_no_identity() -> None:
    assert ProcessId.of(2**22 + 1) is None
    assert not ProcessId(pid=2**22 + 1, started=0.0).alive()


def test_signals_are_counted_and_handlers_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as signals:
        assert signals() == 0
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals() == 2
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_further_signals_do_not_disturb_a_cleanup(first: signal.Signals) -> None:
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


def test_interrupts_wait_for_the_import_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    half = types.SimpleNamespace(__spec__=types.SimpleNamespace(_initializing=True))

    def work() -> None:
        with one_interrupt() as received:
            monkeypatch.setitem(sys.modules, "numpy", half)
            signal.raise_signal(signal.SIGINT)
            assert received() is None
            half.__spec__._initializing = False
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        work()


def test_interrupts_end_other_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupted_module.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with one_interrupt() as received, pytest.raises(KeyboardInterrupt):
        importlib.import_module("interrupted_module")
    assert received() == signal.SIGINT


def test_an_interrupt_is_told_while_a_library_keeps_the_main_thread() -> None:
    told = threading.Event()
    with pytest.raises(KeyboardInterrupt), one_interrupt(told.set):
        signal.raise_signal(signal.SIGTERM)
    assert told.wait(60)


def test_signals_that_are_held_back_arrive_afterwards() -> None:
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

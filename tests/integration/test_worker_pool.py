"""Jobs of several processes, which append lines to a shared file."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from trtserve.checkpoint.worker_pool import run_all, worker_count
from trtserve.errors import ConversionError, CorruptFileError

WAIT = 30.0


@pytest.fixture(params=[1, 3])
def count(request: pytest.FixtureRequest) -> int:
    return int(request.param)


class Workers:
    """Makes workers, and keeps a record of those that came and went and of the jobs that they began."""

    def __init__(self, record: Path, job: Callable[[int], int] = lambda _: 1) -> None:
        self._record = record
        self._job = job
        self._record.touch()

    @contextmanager
    def __call__(self) -> Iterator[Callable[[int], int]]:
        def work(number: int) -> int:
            self.note("begun", number)
            return self._job(number)

        self.note("came", os.getpid())
        try:
            yield work
        finally:
            self.note("left", os.getpid())

    def note(self, word: str, number: int) -> None:
        with self._record.open("a") as handle:  # one write, at the end of the file
            handle.write(f"{word} {number}\n")

    def noted(self, word: str) -> list[int]:
        lines = (line.split() for line in self._record.read_text().splitlines())
        return [int(number) for noted, number in lines if noted == word]


def in_caller() -> Callable[[], bool]:
    caller = os.getpid()
    return lambda: os.getpid() == caller


def gone(process: int) -> bool:
    """Whether a process has ended; who started it may not have looked yet."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def require_ended(made: Workers) -> None:
    """All processes but this one are gone, and all workers were left in peace."""
    others = set(made.noted("came")) - {os.getpid()}
    assert sorted(made.noted("left")) == sorted(made.noted("came"))
    for process in others:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_every_job_runs_once_and_reports_progress(tmp_path: Path, count: int) -> None:
    together = multiprocessing.get_context("fork").Barrier(count)

    def job(number: int) -> int:
        if number < count:
            together.wait(WAIT)
        return number

    made, reported = Workers(tmp_path / "record", job), list[int]()
    run_all(range(100), made, reported.append, count=count)
    assert sorted(made.noted("begun")) == list(range(100))
    assert sum(reported) == sum(range(100))
    assert len(set(made.noted("came"))) == count
    require_ended(made)


def test_fewer_jobs_than_processes(tmp_path: Path) -> None:
    made, reported = Workers(tmp_path / "record"), list[int]()
    run_all(range(2), made, reported.append, count=4)
    run_all([], made, reported.append, count=4)
    assert sorted(made.noted("begun")) == [0, 1]
    assert sum(reported) == 2
    require_ended(made)


def test_error_of_the_earliest_job_is_raised(tmp_path: Path, count: int) -> None:
    together = multiprocessing.get_context("fork").Barrier(count)

    def fail(number: int) -> int:
        if number >= 10:
            together.wait(WAIT)
            raise CorruptFileError(f"job {number}", hint="Try another one.")
        return 1

    made = Workers(tmp_path / "record", fail)
    with pytest.raises(CorruptFileError, match=r"^job 10$") as raised:
        run_all(range(100), made, lambda _: None, count=count)
    assert raised.value.hint == "Try another one."
    assert sorted(made.noted("begun")) == list(range(10 + count))
    require_ended(made)


def test_error_in_one_process_ends_all(tmp_path: Path) -> None:
    here = in_caller()

    def fail(number: int) -> int:
        if not here():
            raise CorruptFileError(f"job {number}")
        return 1

    made = Workers(tmp_path / "record", fail)
    with pytest.raises(CorruptFileError, match=r"^job \d+$"):
        run_all(itertools.count(), made, lambda _: None, count=3)
    require_ended(made)


def test_an_interrupt_ends_all_processes(tmp_path: Path, count: int) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    made = Workers(tmp_path / "record")
    with pytest.raises(KeyboardInterrupt):
        run_all(itertools.count(), made, interrupt, count=count)
    require_ended(made)


def test_terminal_signals_are_left_to_the_caller(tmp_path: Path) -> None:
    here = in_caller()

    def job(_: int) -> int:
        if not here():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
        else:
            eventually(lambda: len(made.noted("begun")) > 5)
        return 1

    made = Workers(tmp_path / "record", job)
    run_all(range(20), made, lambda _: None, count=2)
    assert sorted(made.noted("begun")) == list(range(20))
    require_ended(made)


def test_worker_creation_error_is_raised(tmp_path: Path, count: int) -> None:
    here = in_caller()

    @contextmanager
    def worker() -> Iterator[Callable[[int], int]]:
        if not here() or count == 1:
            raise MemoryError("no buffer")
        yield lambda _: 1

    with pytest.raises(MemoryError, match="no buffer"):
        run_all(range(10), worker, lambda _: None, count=count)


def test_caller_does_all_jobs_when_fork_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    made = Workers(tmp_path / "record")
    run_all(range(5), made, lambda _: None, count=3)
    assert made.noted("begun") == list(range(5))
    assert made.noted("came") == [os.getpid()]


def test_interrupts_do_not_abandon_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that they write to are closed afterwards."""
    here, read, interrupts, released = in_caller(), os.read, [KeyboardInterrupt()] * 3, tmp_path / "released"

    def interrupted(descriptor: int, size: int) -> bytes:
        if interrupts:
            raise interrupts.pop()
        released.touch()
        return read(descriptor, size)

    def job(_: int) -> int:
        if here():
            assert eventually(lambda: len(made.noted("begun")) > 1)
            raise KeyboardInterrupt
        assert eventually(released.exists)
        return 1

    made = Workers(tmp_path / "record", job)
    monkeypatch.setattr(os, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(itertools.count(), made, lambda _: None, count=2)
    assert not interrupts
    require_ended(made)


@pytest.mark.parametrize(
    ("number", "told"),
    [(signal.SIGKILL, r"ended by signal 9 \(SIGKILL\)"), (signal.SIGSTOP, r"stopped by a signal \(SIGSTOP\)")],
)
def test_killed_or_stopped_process_ends_the_others_with_an_error(
    number: signal.Signals, told: str, tmp_path: Path
) -> None:
    here = in_caller()

    def job(_: int) -> int:
        if not here():
            os.kill(os.getpid(), number)
        return 1

    made = Workers(tmp_path / "record", job)
    with pytest.raises(ConversionError, match=told):
        run_all(itertools.count(), made, lambda _: None, count=3)
    for process in set(made.noted("came")) - {os.getpid()}:
        assert gone(process)


def test_processes_do_not_outlive_the_caller(tmp_path: Path) -> None:
    def job(_: int) -> int:
        time.sleep(WAIT)
        return 1

    made = Workers(tmp_path / "record", job)
    caller = os.fork()
    if caller == 0:
        run_all(itertools.count(), made, lambda _: None, count=3)
        os._exit(0)
    try:
        assert eventually(lambda: len(made.noted("begun")) == 3)
    finally:
        os.kill(caller, signal.SIGKILL)
        os.waitpid(caller, 0)
    assert eventually(lambda: all(gone(process) for process in made.noted("came")))
    assert made.noted("left") == []


def test_exclusive_jobs_run_one_at_a_time(tmp_path: Path) -> None:
    def job(number: int) -> int:
        if number % 2:
            time.sleep(0.002)
            made.note("ended", number)
        return 1

    made = Workers(tmp_path / "record", job)
    run_all(range(60), made, lambda _: None, count=3, alone=lambda number: number % 2 == 1)
    assert sorted(made.noted("begun")) == list(range(60))
    lines = [line.split() for line in (tmp_path / "record").read_text().splitlines()]
    odd = [number for word, number in lines if word in ("begun", "ended") and int(number) % 2]
    assert odd[::2] == odd[1::2]


def test_one_process_per_core_up_to_four(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 2), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert worker_count() == expected

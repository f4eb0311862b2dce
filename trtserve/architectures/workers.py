"""A sequence of jobs shared by as many processes as there are cores; the calling process is one of them.

Processes, not threads: every call of NumPy gives the interpreter's lock away and takes it back, and two threads that
cast waited for it longer than they worked (docs/decisions/0010). They are forked, which takes milliseconds, see all
that the caller has made, and do nothing but the jobs: what other threads of the caller hold is never asked for.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import mmap
import os
import select
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NoReturn, TypeVar

from trtserve.errors import ConversionError
from trtserve.interrupts import ENDING, held_back
from trtserve.orphans import end_with_parent

J = TypeVar("J")
Worker = Callable[[J], int]
_Failure = tuple[int, Exception]

# Reading and writing files that the page cache holds is bound by memory, which a few cores saturate.
_MOST = 4
# Failures of no job come after those of jobs.
_LAST = sys.maxsize
# Bytes of the lock file, each of which is a lock.
_NEXT, _ALONE = 0, 1


def worker_count() -> int:
    """Processes that carry out jobs at most: one for each core that this process may use, up to four."""
    return min(_MOST, len(os.sched_getaffinity(0)))


def run_all(
    jobs: Iterable[J],
    worker: Callable[[], AbstractContextManager[Worker[J]]],
    advance: Callable[[int], None],
    *,
    count: int,
    alone: Callable[[J], bool] = lambda _: False,
) -> None:
    """Carry out `jobs`, which are begun in their order, each by one of `count` processes.

    Every process makes itself a `worker`, a function that returns how much a job brought forward; `advance` is called
    with it in the calling process. Of jobs that are `alone` one is under way at a time. `jobs` are gone through in
    each process and must be the same in all. Of several errors that of the earliest job is raised, so that it is the
    same in each run; an interrupt ends all processes after the job they are at. ConversionError when a process was
    killed.
    """
    helpers, caller = _Helpers(), os.getpid()
    with _Board(count) as board:

        def look() -> None:
            advance(board.take_progress())
            if helpers.have_failed():
                board.stop()

        def help_out(place: int) -> _Failure | None:
            return _work(board, place, jobs, worker, alone, _end_without(caller))

        try:
            for place in range(1, count):
                if not helpers.begin(functools.partial(help_out, place)):
                    break  # a limit allows no further process: those that there are do all of it
            failure = _work(board, 0, jobs, worker, alone, look)
        finally:
            board.stop()
            helpers.join()
        failures = [*helpers.failures, *([failure] if failure else [])]
        if failures:
            raise min(failures, key=lambda each: each[0])[1]
        advance(board.take_progress())


def _end_without(parent: int) -> Callable[[], None]:
    """Ends a process whose parent is gone, also where no kernel does that."""

    def look() -> None:
        if os.getppid() != parent:
            os._exit(1)

    return look


def _work(
    board: _Board,
    place: int,
    jobs: Iterable[J],
    worker: Callable[[], AbstractContextManager[Worker[J]]],
    alone: Callable[[J], bool],
    after: Callable[[], None],
) -> _Failure | None:
    """Carry out jobs until none is left, and call `after` after each; returns what failed, with the job's number."""
    number = _LAST
    try:
        with worker() as carry_out:
            for begun, job in _begun(board, jobs):
                number = begun
                with board.alone() if alone(job) else nullcontext():
                    board.done(place, carry_out(job))
                after()
    except Exception as error:  # noqa: BLE001 - raised again by the calling process, after those of earlier jobs
        board.stop()
        return number, error
    return None


def _begun(board: _Board, jobs: Iterable[J]) -> Iterator[tuple[int, J]]:
    """The jobs that fall to this process, with their numbers."""
    wanted = board.next_number()
    for number, job in enumerate(jobs):
        if wanted is None:
            return
        if number == wanted:
            yield number, job
            wanted = board.next_number()


class _Board:
    """What all processes see: the number of the next job, whether they shall stop, and how far each has come.

    Its locks are the kernel's, which takes them from a process that was killed.
    """

    def __init__(self, count: int) -> None:
        self._page = mmap.mmap(-1, 8 * (2 + count))
        self._numbers = memoryview(self._page).cast("Q")
        self._lock = _nameless_file()
        self._told = 0

    def __enter__(self) -> _Board:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)
        self._numbers.release()
        self._page.close()

    def next_number(self) -> int | None:
        """The number of the next job; None after an error."""
        with _held(self._lock, _NEXT):
            if self._numbers[1]:
                return None
            number = self._numbers[0]
            self._numbers[0] = number + 1
            return number

    def done(self, place: int, amount: int) -> None:
        """The process at `place` has carried out a job."""
        self._numbers[2 + place] += amount

    def stop(self) -> None:
        """No further job begins. Jobs before one that failed are all begun, and are ended."""
        with _held(self._lock, _NEXT):
            self._numbers[1] = 1

    def alone(self) -> AbstractContextManager[None]:
        """While this is held, no other process holds it."""
        return _held(self._lock, _ALONE)

    def take_progress(self) -> int:
        """What the jobs brought forward since the last call."""
        total = sum(self._numbers[2:])
        amount, self._told = total - self._told, total
        return amount


@contextmanager
def _held(lock: int, place: int) -> Iterator[None]:
    fcntl.lockf(lock, fcntl.LOCK_EX, 1, place)
    try:
        yield
    finally:
        fcntl.lockf(lock, fcntl.LOCK_UN, 1, place)


def _nameless_file() -> int:
    """Descriptor of a file that nothing is left of; in memory where there is such a thing (Linux)."""
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    return os.memfd_create("trtserve")


class _Helpers:
    """The processes beside the calling one; each ends with what failed, or None, pickled into a pipe."""

    def __init__(self) -> None:
        self._running: dict[int, int] = {}
        self.failures: list[_Failure] = []

    def begin(self, work: Callable[[], _Failure | None]) -> bool:
        """Fork a process that does `work`; returns whether one could be made."""
        end = end_with_parent(signal.SIGKILL, waited_for=True)
        with held_back():  # so that a process is known before an interrupt can be
            read, write = os.pipe()
            child = _fork()
            if child == 0:
                _help(work, end, write)
            os.close(write)
            if child is None:
                os.close(read)
                return False
            self._running[child] = read
        return True

    def have_failed(self) -> bool:
        """Whether one has ended that ought not to have; those that have ended are taken note of."""
        ended, _, _ = select.select(list(self._running.values()), [], [], 0)
        for child in [child for child, read in self._running.items() if read in ended]:
            self._collect(child)
        return bool(self.failures)

    def join(self) -> None:
        """Wait until all are at their ends, through interrupts: what they write to is taken away afterwards."""
        try:
            for child in list(self._running):
                self._collect(child)
        except KeyboardInterrupt:
            self.join()
            raise

    def _collect(self, child: int) -> None:
        """Wait for a process to end, and note what failed in it."""
        import pickle

        read, told = self._running[child], b""
        while part := os.read(read, 1 << 16):
            told += part
        status = 0
        with suppress(ChildProcessError):  # waited for before an interrupt, or by a program that ignores SIGCHLD
            status = os.waitpid(child, 0)[1]
        os.close(read)
        del self._running[child]
        failure = pickle.loads(told) if told else (_LAST, _killed(os.waitstatus_to_exitcode(status)))
        if failure is not None:
            self.failures.append(failure)


def _fork() -> int | None:
    """As os.fork; None where there can be no further process."""
    with warnings.catch_warnings(), suppress(OSError):
        # Python 3.12 warns of locks that other threads hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
    return None


def _help(work: Callable[[], _Failure | None], end: Callable[[], None] | None, write: int) -> NoReturn:
    """What a new process does: `work`, and nothing of what its parent would do further on or at its end."""
    import pickle

    code = 1
    try:
        for number in ENDING:  # the parent ends this process, after its job
            signal.signal(number, signal.SIG_IGN)
        if end is not None:
            end()
        gc.freeze()  # the collector would write to every object that is shared with the parent
        told = pickle.dumps(work())
        while told:
            told = told[os.write(write, told) :]
        code = 0
    finally:
        os._exit(code)


def _killed(code: int) -> ConversionError:
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"code {code}"
    return ConversionError(
        f"A process of the conversion was ended by {how}, not by an error of its own.",
        hint="The kernel does that where memory is short (dmesg, events of the container): free some, then try again.",
    )

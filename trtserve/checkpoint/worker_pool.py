"""Run a sequence of jobs in up to one process per core; the calling process is one of them.

Processes, not threads: every NumPy call releases and reacquires the interpreter lock, and two casting threads waited
for it longer than they worked (docs/decisions/0010). They are forked, which takes milliseconds, so they share
everything the caller has built; they never touch locks of the caller's other threads.
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
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import NoReturn, TypeVar

from trtserve.errors import ConversionError
from trtserve.process.halts import HALTED, halted_workers_end
from trtserve.process.signals import ENDING, end_with_parent, held_back

J = TypeVar("J")
Worker = Callable[[J], int]
_Failure = tuple[int, Exception]

_MOST = 4  # reading and writing files in the page cache is memory-bound; a few cores saturate it
_LAST = sys.maxsize  # failures outside any job sort after those of jobs
_NEXT, _ALONE = 0, 1  # bytes of the lock file; each byte is a lock


def worker_count() -> int:
    """Return the maximum number of processes: one per available core, at most four."""
    return min(_MOST, len(os.sched_getaffinity(0)))


def run_all(
    jobs: Iterable[J],
    worker: Callable[[], AbstractContextManager[Worker[J]]],
    advance: Callable[[int], None],
    *,
    count: int,
    alone: Callable[[J], bool] = lambda _: False,
) -> None:
    """Run `jobs`, started in order, in `count` processes.

    Each process creates a `worker`, a function that returns the progress of one job; `advance` is called with it in the
    calling process. Jobs marked `alone` run one at a time. Every process iterates over `jobs`, so they must be the same
    in all. When several jobs fail, the error of the earliest is raised, so that runs are reproducible. An interrupt
    ends all processes after their current job. Raises ConversionError when a process was killed.
    """
    helpers, caller = _Workers(), os.getpid()
    with closing(_Board(count)) as board:

        def look() -> None:
            advance(board.take_progress())
            if helpers.have_failed():
                board.stop()

        def end_without_caller() -> None:  # also where the kernel cannot end a process with its parent
            if os.getppid() != caller:
                os._exit(1)

        def help_out(place: int) -> _Failure | None:
            return _work(board, place, jobs, worker, alone, end_without_caller)

        with halted_workers_end(helpers.pids) as helpers.halted:
            try:
                for place in range(1, count):
                    if not helpers.begin(functools.partial(help_out, place)):
                        break  # at the process limit, the existing ones do all jobs
                failure = _work(board, 0, jobs, worker, alone, look)
            finally:
                board.stop()
                helpers.join()
        failures = [*helpers.failures, *([failure] if failure else [])]
        if failures:
            raise min(failures, key=lambda each: each[0])[1]
        advance(board.take_progress())


def _work(
    board: _Board,
    place: int,
    jobs: Iterable[J],
    worker: Callable[[], AbstractContextManager[Worker[J]]],
    alone: Callable[[J], bool],
    after: Callable[[], None],
) -> _Failure | None:
    """Run jobs until none is left, calling `after` after each; return the failure and its job number."""
    number = _LAST
    try:
        with worker() as carry_out:
            for begun, job in _begun(board, jobs):
                number = begun
                with board.alone() if alone(job) else nullcontext():
                    board.done(place, carry_out(job))
                after()
    except Exception as error:  # noqa: BLE001 - raised again by the caller, after those of earlier jobs
        board.stop()
        return number, error
    return None


def _begun(board: _Board, jobs: Iterable[J]) -> Iterator[tuple[int, J]]:
    """Yield this process's jobs with their numbers."""
    wanted = board.next_number()
    for number, job in enumerate(jobs):
        if wanted is None:
            return
        if number == wanted:
            yield number, job
            wanted = board.next_number()


class _Board:
    """State shared by all processes: the next job's number, the stop flag and each process's progress.

    It uses kernel locks, which are released when a process is killed.
    """

    def __init__(self, count: int) -> None:
        self._page = mmap.mmap(-1, 8 * (2 + count))
        self._numbers = memoryview(self._page).cast("Q")
        self._lock = _nameless_file()
        self._told = 0

    def close(self) -> None:
        """Give the locks and the memory back."""
        os.close(self._lock)
        self._numbers.release()
        self._page.close()

    def next_number(self) -> int | None:
        """Take the number of the next job, or None after an error."""
        with _held(self._lock, _NEXT):
            if self._numbers[1]:
                return None
            number = self._numbers[0]
            self._numbers[0] = number + 1
            return number

    def done(self, place: int, amount: int) -> None:
        """Record that the process at `place` finished a job."""
        self._numbers[2 + place] += amount

    def stop(self) -> None:
        """Start no further job. Jobs before the failed one have all started and will finish."""
        with _held(self._lock, _NEXT):
            self._numbers[1] = 1

    def alone(self) -> AbstractContextManager[None]:
        """Hold exclusively; no other process can hold it meanwhile."""
        return _held(self._lock, _ALONE)

    def take_progress(self) -> int:
        """Return the progress since the last call."""
        total = sum(self._numbers[2:])
        amount, self._told = total - self._told, total
        return amount


@contextmanager
def _held(lock: int, place: int) -> Iterator[None]:
    fcntl.lockf(lock, fcntl.LOCK_EX, 1, place)
    try:
        yield
    finally:
        with suppress(OSError):  # a signal ended the conversion: the file is closed, and with it no lock is held
            fcntl.lockf(lock, fcntl.LOCK_UN, 1, place)


def _nameless_file() -> int:
    """Return a descriptor of an anonymous file, in memory where the system supports it (Linux)."""
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    return os.memfd_create("trtserve")


class _Workers:
    """The forked processes; each ends by pickling its failure, or None, into a pipe."""

    def __init__(self) -> None:
        self._running: dict[int, int] = {}
        self.halted: Collection[int] = ()
        """Those that were killed because a signal had stopped them."""
        self.failures: list[_Failure] = []

    def pids(self) -> list[int]:
        return list(self._running)

    def begin(self, work: Callable[[], _Failure | None]) -> bool:
        """Fork a process that runs `work`; return whether that was possible."""
        end = end_with_parent(signal.SIGKILL, waited_for=True)
        with held_back():  # register the process before an interrupt can arrive
            read, write = os.pipe()
            child = _fork()
            if child == 0:
                _run_worker(work, end, write)
            os.close(write)
            if child is None:
                os.close(read)
                return False
            self._running[child] = read
        return True

    def have_failed(self) -> bool:
        """Return whether a process ended with a failure; collects ended processes."""
        pipes = select.poll()
        for read in self._running.values():
            pipes.register(read)
        ended = {read for read, _ in pipes.poll(0)}
        for child in [child for child, read in self._running.items() if read in ended]:
            self._collect(child)
        return bool(self.failures)

    def join(self) -> None:
        """Wait for all processes, even through interrupts: the files they write to are removed afterwards."""
        try:
            for child in list(self._running):
                self._collect(child)
        except KeyboardInterrupt:
            self.join()
            raise

    def _collect(self, child: int) -> None:
        """Wait for a process and record its failure."""
        import pickle

        read, told = self._running[child], b""
        while part := os.read(read, 1 << 16):
            told += part
        status = 0
        with suppress(ChildProcessError):  # waited for before an interrupt, or by a program that ignores SIGCHLD
            status = os.waitpid(child, 0)[1]
        os.close(read)
        del self._running[child]
        if told:
            failure = pickle.loads(told)
        else:
            code = os.waitstatus_to_exitcode(status)
            how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"code {code}"
            killed = ConversionError(
                f"A process of the conversion was ended by {how}, not by an error of its own.",
                hint="The kernel does this when memory runs out (see dmesg). Free some memory and try again.",
            )
            if child in self.halted:
                killed = ConversionError(f"A process of the conversion {HALTED}, and was ended: try again.")
            failure = (_LAST, killed)
        if failure is not None:
            self.failures.append(failure)


def _fork() -> int | None:
    """Return os.fork()'s result, or None at the process limit."""
    with warnings.catch_warnings(), suppress(OSError):
        # Python 3.12 warns about locks of other threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
    return None


def _run_worker(work: Callable[[], _Failure | None], end: Callable[[], None] | None, write: int) -> NoReturn:
    """Run `work` in the new process and exit without running the parent's cleanup."""
    import pickle

    code = 1
    try:
        for number in ENDING:  # the parent ends this process, after its job
            signal.signal(number, signal.SIG_IGN)
        if end is not None:
            end()
        gc.freeze()  # the garbage collector would write to every object shared with the parent
        told = pickle.dumps(work())
        while told:
            told = told[os.write(write, told) :]
        code = 0
    finally:
        os._exit(code)

"""A sequence of jobs shared by as many threads as there are cores; the calling thread is one of them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Generic, TypeVar

J = TypeVar("J")
Worker = Callable[[J], int]

# Reading and writing files that the page cache holds is bound by memory, which a few cores saturate.
_MOST = 4


def worker_count() -> int:
    """Threads that carry out jobs: one for each core that this process may use, up to four."""
    return min(_MOST, len(os.sched_getaffinity(0)))


def run_all(
    jobs: Iterable[J], worker: Callable[[], AbstractContextManager[Worker[J]]], advance: Callable[[int], None]
) -> None:
    """Carry out `jobs`, which are begun in their order, each by one thread.

    Every thread makes itself a `worker`, a function that returns how much a job brought forward; `advance` is called
    with it in the calling thread. Of several errors that of the earliest job is raised, so that it is the same in
    each run; an interrupt ends all threads after the job they are at.
    """
    shared = _Shared(jobs)
    helpers = [threading.Thread(target=_help, args=(shared, worker)) for _ in range(worker_count() - 1)]
    try:
        with suppress(RuntimeError):  # a limit allows no further thread: those that there are do all of it
            for helper in helpers:
                helper.start()
        _work(shared, worker, advance)
    finally:
        shared.stop()
        _join(helpers)
    shared.raise_earliest()
    advance(shared.take_progress())


def _join(helpers: Sequence[threading.Thread]) -> None:
    """Wait until the threads are at their ends, through interrupts: what they write to is taken away afterwards.

    One that is not alive has not begun, and will find no job, or has ended.
    """
    try:
        for helper in helpers:
            if helper.is_alive():
                helper.join()
    except KeyboardInterrupt:
        _join(helpers)
        raise


class _Shared(Generic[J]):
    """What the threads share: the jobs that are left, progress that is not reported yet, and errors by job."""

    def __init__(self, jobs: Iterable[J]) -> None:
        self._jobs = enumerate(jobs)
        self._lock = threading.Lock()
        self._progress = 0
        self._errors: dict[int, Exception] = {}
        self._stopped = False

    def next_job(self) -> tuple[int, J] | None:
        """The next job and its number; None when none is left, or after an error."""
        with self._lock:
            return None if self._stopped else next(self._jobs, None)

    def done(self, amount: int) -> None:
        """A job is carried out."""
        with self._lock:
            self._progress += amount

    def failed(self, number: int, error: Exception) -> None:
        """A job has failed: those before it, which are all begun, are ended, and no other one begins."""
        with self._lock:
            self._errors[number] = error
            self._stopped = True

    def stop(self) -> None:
        """No further job begins."""
        with self._lock:
            self._stopped = True

    def take_progress(self) -> int:
        """What the jobs brought forward since the last call."""
        with self._lock:
            amount, self._progress = self._progress, 0
            return amount

    def raise_earliest(self) -> None:
        """Raise the error of the earliest job that failed, if one did."""
        if self._errors:
            raise self._errors[min(self._errors)]


def _help(shared: _Shared[J], worker: Callable[[], AbstractContextManager[Worker[J]]]) -> None:
    try:
        _work(shared, worker, None)
    except Exception as error:  # noqa: BLE001 - no job's: raised again by the calling thread, after those of jobs
        shared.failed(sys.maxsize, error)


def _work(
    shared: _Shared[J],
    worker: Callable[[], AbstractContextManager[Worker[J]]],
    advance: Callable[[int], None] | None,
) -> None:
    """Carry out jobs until none is left, and tell `advance`, if this is the calling thread, how far all threads are."""
    with worker() as carry_out:
        while (numbered := shared.next_job()) is not None:
            number, job = numbered
            try:
                shared.done(carry_out(job))
            except Exception as error:  # noqa: BLE001 - raised again by the calling thread
                shared.failed(number, error)
            if advance is not None:
                advance(shared.take_progress())

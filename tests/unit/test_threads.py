"""Jobs that several threads share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from trtserve.architectures.threads import run_all, worker_count


@pytest.fixture(autouse=True, params=[1, 3])
def _cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(request.param)))


class Workers:
    """Makes workers and counts those that came and went."""

    def __init__(self, job: Callable[[int], int]) -> None:
        self.job = job
        self.begun: list[int] = []
        self.left = 0

    @contextmanager
    def __call__(self) -> Iterator[Callable[[int], int]]:
        def work(number: int) -> int:
            self.begun.append(number)
            return self.job(number)

        try:
            yield work
        finally:
            self.left += 1


def test_each_job_is_done_once_and_all_progress_is_told() -> None:
    workers, told = Workers(lambda number: number), list[int]()
    run_all(range(100), workers, told.append)
    assert sorted(workers.begun) == list(range(100))
    assert sum(told) == sum(range(100))
    assert workers.left == worker_count()


def test_the_error_of_the_earliest_job_is_raised_and_the_rest_is_left() -> None:
    together = threading.Barrier(worker_count())

    def fail(number: int) -> int:
        if number >= 10:
            together.wait(30)
            raise ValueError(number)
        return 1

    workers = Workers(fail)
    with pytest.raises(ValueError, match=r"^10$"):
        run_all(range(100), workers, lambda _: None)
    assert sorted(workers.begun) == list(range(10 + worker_count()))
    assert workers.left == worker_count()


def test_an_interrupt_ends_all_threads() -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    workers, others = Workers(lambda number: number), threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_all(iter(int, 1), workers, interrupt)
    assert workers.left == worker_count()
    assert threading.active_count() == others


def test_a_worker_that_cannot_be_made_is_told() -> None:
    caller = threading.current_thread()

    @contextmanager
    def worker() -> Iterator[Callable[[int], int]]:
        if threading.current_thread() is not caller or worker_count() == 1:
            raise MemoryError("no buffer")
        yield lambda _: 1

    with pytest.raises(MemoryError, match="no buffer"):
        run_all(range(10), worker, lambda _: None)


def test_where_no_thread_can_be_started_the_caller_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    workers = Workers(lambda number: 1)
    run_all(range(5), workers, lambda _: None)
    assert workers.begun == list(range(5))
    assert workers.left == 1


def test_interrupts_do_not_end_the_wait_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that they write to are closed afterwards."""
    join, interrupts = threading.Thread.join, [KeyboardInterrupt()] * 3
    at_work, released = threading.Event(), threading.Event()

    def interrupted(thread: threading.Thread) -> None:
        if interrupts:
            raise interrupts.pop()
        released.set()
        join(thread)

    def job(_: int) -> int:
        if threading.current_thread() is threading.main_thread():
            assert at_work.wait(30) or worker_count() == 1
            raise KeyboardInterrupt
        at_work.set()
        released.wait(30)
        return 1

    if worker_count() == 1:
        at_work.set()
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    workers = Workers(job)
    with pytest.raises(KeyboardInterrupt):
        run_all(range(100), workers, lambda _: None)
    assert workers.left == worker_count()

"""The worker processes of a run: one in this process, or several children.

Every worker knows its share of the absolute schedule before the run, so nothing passes between processes inside the
measured window; counters for the display are in shared memory. Results are pooled afterwards, request by request.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import uvloop

from trtserve.bench.monitoring import Live, LoadSampler, Totals, WorkerHealth, shared_cells
from trtserve.bench.records import RequestRecord, pooled
from trtserve.bench.worker import CANCEL_TIMEOUT, Load, LoadWorker, Sent, Share, shares
from trtserve.errors import BenchmarkError, TrtserveError

_LEAD = 0.05  # seconds between the decision to start and the start
_END_TIMEOUT = 60.0  # for workers to decode and hand over their records after an interrupt


@dataclass(frozen=True, kw_only=True)
class LoadOutcome:
    """Records in the order of the requests, and how the run ended."""

    records: list[RequestRecord]
    interrupted: bool = False
    """By the user."""
    timed_out: bool = False
    """By the time limit."""
    health: Sequence[WorkerHealth] = ()
    start_ns: int = 0
    """Time 0 of the schedule."""


def run_load(load: Load, *, workers: int = 1, sampler: LoadSampler | None = None) -> LoadOutcome:
    """Send the warm-up, then the measured requests. SIGINT cancels requests in flight and returns what was measured.

    `sampler` watches the measured window.
    After `load.timeout` seconds the requests in flight count as failed, the remaining ones as never sent. Raises
    ServerUnreachableError without a connection and RequestError when the whole warm-up fails.
    """
    parts = shares(load, workers if load.concurrency is None else min(workers, load.concurrency))
    group: _Children | _OwnProcess = _Children(parts) if len(parts) > 1 else _OwnProcess(parts[0])
    try:
        group.prepare()
        if sampler is not None:
            sampler.begin(group.totals)  # before the start is set: a display takes 0.2 s to appear
        try:
            start_ns = time.monotonic_ns() + round(_LEAD * 1e9)
            sent = group.run(start_ns)
        finally:
            if sampler is not None:
                sampler.end()
    finally:
        group.close()
    return LoadOutcome(
        records=pooled(part.records for part in sent),
        interrupted=group.interrupted,
        timed_out=any(part.timed_out for part in sent),
        health=[part.health for part in sent],
        start_ns=start_ns,
    )


class _OwnProcess:
    """One worker in this process."""

    def __init__(self, share: Share) -> None:
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._live = Live()
        self._worker = LoadWorker(share, self._live, self._stop)
        self._previous: Any = None
        # Only the main thread can receive signals.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            self._loop.add_signal_handler(signal.SIGINT, self._stop.set)

    def prepare(self) -> None:
        self._loop.run_until_complete(self._worker.prepare())

    def run(self, start_ns: int) -> list[Sent]:
        return [self._loop.run_until_complete(self._worker.run(start_ns))]

    def totals(self) -> Totals:
        return Totals([self._live])

    @property
    def interrupted(self) -> bool:
        return self._stop.is_set()

    def close(self) -> None:
        if self._previous is not None:
            self._loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, self._previous)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class _Children:
    """Several workers, each in a process of its own."""

    def __init__(self, own: Sequence[Share]) -> None:
        context = multiprocessing.get_context("spawn")
        self.interrupted = False
        self._lives, self._pipes, self._processes = [], [], []
        for share in own:
            ours, theirs = context.Pipe()
            live = Live(shared_cells())
            process = context.Process(target=_work, args=(share, live.cells, theirs), daemon=True)
            process.start()
            theirs.close()
            self._lives.append(live)
            self._pipes.append(ours)
            self._processes.append(process)

    def prepare(self) -> None:
        self._collect()

    def run(self, start_ns: int) -> list[Sent]:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(start_ns)
        return self._collect()

    def totals(self) -> Totals:
        return Totals(self._lives)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a worker that still runs stops at the end of its pipe
        for process in self._processes:
            process.join(CANCEL_TIMEOUT)
            if process.is_alive():
                process.kill()
                process.join()

    def _collect(self) -> list[Any]:
        """Return one message of each worker; an interrupt makes them stop and still answer."""
        answers: dict[Connection, Any] = {}
        deadline: float | None = None
        while len(answers) < len(self._pipes):
            waiting = [pipe for pipe in self._pipes if pipe not in answers]
            try:
                for pipe in wait(waiting, timeout=0.5):
                    answers[pipe] = _received(pipe)  # type: ignore[index, arg-type]
            except KeyboardInterrupt:
                self.interrupted = True
                deadline = time.monotonic() + _END_TIMEOUT
                for pipe in self._pipes:
                    with suppress(OSError):
                        pipe.send(None)
            if deadline is not None and time.monotonic() > deadline:
                raise BenchmarkError(f"Workers did not end within {_END_TIMEOUT:g} s after the interrupt.")
        return [answers[pipe] for pipe in self._pipes]


def _received(pipe: Connection) -> Any:
    try:
        answer = pipe.recv()
    except EOFError:
        raise BenchmarkError(
            "A worker process ended unexpectedly.", hint="It may have been killed for its memory: use fewer --workers."
        ) from None
    if isinstance(answer, TrtserveError):
        raise answer
    return answer


def _work(share: Share, cells: Any, pipe: Connection) -> None:
    """Run one worker process: answer when ready, start at the time that comes, answer with the records."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    uvloop.run(_serve(share, Live(cells), pipe))


async def _serve(share: Share, live: Live, pipe: Connection) -> None:
    stop, start = asyncio.Event(), asyncio.get_running_loop().create_future()

    def on_message() -> None:
        try:
            message = pipe.recv()
        except EOFError:
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            message = None
        if message is None:
            stop.set()
        if not start.done():
            start.set_result(message or time.monotonic_ns())

    asyncio.get_running_loop().add_reader(pipe.fileno(), on_message)
    try:
        worker = LoadWorker(share, live, stop)
        await worker.prepare()
        pipe.send(True)
        answer: Any = await worker.run(await start)
    except TrtserveError as error:
        answer = error
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    os.set_blocking(pipe.fileno(), True)  # uvloop made it non-blocking, which would cut off the records
    with suppress(ConnectionError):
        pipe.send(answer)

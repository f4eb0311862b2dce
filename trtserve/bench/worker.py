"""Send the requests of a run: one worker in this process, or several children, each from one event loop.

Requests are encoded before the measured window and answers are decoded after it. Every worker knows its share of the
absolute schedule before the run, so nothing passes between processes inside the window; counters for the display are
in shared memory. Results are pooled afterwards, request by request.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import heapq
import itertools
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any

import uvloop

from trtserve.bench.messages import repeats_prompt, takes_text
from trtserve.bench.monitoring import HealthMonitor, Live, LoadSampler, Totals, WorkerHealth, shared_cells
from trtserve.bench.records import RequestRecord, Status, TrafficRequest, pooled
from trtserve.bench.transport import Chunk, LoadTarget, SendError, make_transport
from trtserve.errors import BenchmarkError, RequestError, ServerUnreachableError, TrtserveError
from trtserve.process.halts import HALTED, halted_workers_end

CANCEL_TIMEOUT = 5.0
_OPENED = 32  # connections of an open loop without a limit; more are opened when these are busy
_INTERRUPTED: tuple[Status, str] = ("cancelled", "interrupted")
_CANCELLED: tuple[Status, str] = ("cancelled", "cancelled by --cancel-rate")


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of a run, and how to send them."""

    target: LoadTarget
    requests: Sequence[TrafficRequest]
    warmup: Sequence[TrafficRequest] = ()
    offsets: Sequence[float] | None = None
    """Send times in seconds after the start (open loop), or None for a closed loop; one for each conversation."""
    concurrency: int | None = None
    timeout: float = 600.0
    may_be_empty: bool = False  # whether an answer without tokens counts as complete, since the model may end at once

    def conversations(self) -> list[list[tuple[int, TrafficRequest]]]:
        """Return the numbered requests; the turns of a conversation stay together."""
        numbered = enumerate(self.requests)
        groups = groupby(numbered, key=lambda each: ("alone", each[0]) if each[1].session is None else each[1].session)
        return [list(group) for _, group in groups]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one worker sends: some conversations of a load, with the numbers that their requests have in the run."""

    worker: int
    conversations: Sequence[Sequence[tuple[int, TrafficRequest]]]
    load: Load  # Warm-up, times and concurrency of this worker; its requests are in the conversations


def shares(load: Load, count: int) -> list[Share]:
    """Divide a load among `count` workers, so that together they send exactly its requests at its times."""
    conversations = load.conversations()
    # More users than conversations would have nothing to do; the warm-up has as many.
    most = None if load.concurrency is None else min(load.concurrency, max(len(conversations), len(load.warmup)))
    return [
        Share(
            worker=worker,
            conversations=conversations[worker::count],
            load=replace(
                load,
                requests=(),
                warmup=load.warmup[worker::count],
                offsets=None if load.offsets is None else load.offsets[worker::count],
                # The first ones have one more where it does not divide evenly.
                concurrency=None if most is None else max(1, len(range(worker, most, count))),
            ),
        )
        for worker in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class Sent:
    records: list[RequestRecord]
    health: WorkerHealth
    timed_out: bool


class LoadWorker:
    """Sends one share. Call `prepare`, then `run`; setting `stop` ends either."""

    def __init__(self, share: Share, live: Live, stop: asyncio.Event) -> None:
        self._share, self._load, self._live, self._stop = share, share.load, live, stop
        self._transport = make_transport(self._load.target, timeout=self._load.timeout)
        self._arrived: dict[int, list[Chunk]] = {}
        self._cut_off = _INTERRUPTED
        self._run = uuid.uuid4().hex

    async def prepare(self) -> None:
        """Connect, send the warm-up and encode the requests of the window.

        Raises ServerUnreachableError without a connection and RequestError when the whole warm-up fails.
        """
        self._timers = Timers()
        await self._transport.open(self._load.concurrency or (1 if self._load.offsets is None else _OPENED))
        warmup = [[(index, request)] for index, request in enumerate(self._load.warmup)]
        records = self._begin(warmup)
        if warmup:
            await self._bounded(self._closed(warmup, records))
        self._decode(records.values())
        failed = [record for record in records.values() if record.status == "failed"]
        if warmup and len(failed) == len(warmup) and not self._stop.is_set():
            raise RequestError(f"All {len(warmup)} warm-up requests failed; the first: {failed[0].error}")
        self._live.reset()
        self._records = self._begin(self._share.conversations)
        # Before the start is set, since it takes 0.2 s: what exists now is left out of garbage collections.
        gc.collect()
        self._froze = gc.get_freeze_count() == 0  # what a caller has frozen stays so: Python thaws all or nothing
        if self._froze:
            gc.freeze()

    async def run(self, start_ns: int) -> Sent:
        """Send the requests; time 0 of the schedule is `start_ns` of the monotonic clock."""
        monitor, timed_out = HealthMonitor(self._share.worker), False
        monitor.begin()
        opened, crowded = self._transport.opened, self._transport.pressure.crowded_reads
        self._transport.pressure.write_blocked_max_ns = 0
        if not self._stop.is_set():
            window = self._closed if self._load.offsets is None else self._open
            timed_out = await self._bounded(window(self._share.conversations, self._records, start_ns))
        health = monitor.end()
        if self._froze:
            gc.unfreeze()
        health.late_connections = self._transport.opened - opened
        pressure = self._transport.pressure
        health.write_blocked_max_ms = pressure.write_blocked_max_ns / 1e6
        health.crowded_reads = pressure.crowded_reads - crowded
        await self._transport.close()
        self._timers.close()
        self._decode(self._records.values())
        return Sent(records=list(self._records.values()), health=health, timed_out=timed_out)

    def _begin(self, conversations: Sequence[Sequence[tuple[int, TrafficRequest]]]) -> dict[int, RequestRecord]:
        """Make the records, and encode all messages that do not depend on an answer."""
        records: dict[int, RequestRecord] = {}
        self._messages: dict[int, Any] = {}
        for turns in conversations:
            for number, (index, request) in enumerate(turns):
                records[index] = RequestRecord(
                    index=index,
                    input_tokens=len(request.token_ids),
                    requested_tokens=request.output_len,
                    worker=self._share.worker,
                    streamed=self._load.target.streams,
                )
                if number == 0:
                    self._messages[index] = self._transport.encode(request, f"{self._run}-{index}")
        return records

    async def _bounded(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run `work` until it ends, the user interrupts it or the time limit passes; return True for the limit."""
        self._cut_off = _INTERRUPTED
        task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stopping}, timeout=self._load.timeout, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if task.done():
            task.result()
            return False
        timed_out = not self._stop.is_set()
        if timed_out:
            self._cut_off = ("failed", f"not answered within the benchmark's time limit of {self._load.timeout:g} s")
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_TIMEOUT)
        return timed_out

    async def _closed(
        self,
        conversations: Sequence[Sequence[tuple[int, TrafficRequest]]],
        records: dict[int, RequestRecord],
        start_ns: int = 0,
    ) -> None:
        """Run `concurrency` users, each having its next conversation when its last one has ended."""
        pending = iter(conversations)
        await self._timers.until(start_ns)

        async def user() -> None:
            for turns in pending:
                await self._converse(turns, records, time.monotonic_ns())

        await asyncio.gather(*(user() for _ in range(self._load.concurrency or 1)))

    async def _open(
        self,
        conversations: Sequence[Sequence[tuple[int, TrafficRequest]]],
        records: dict[int, RequestRecord],
        start_ns: int,
    ) -> None:
        """Begin every conversation at its time in the schedule; waiting for the concurrency limit counts as latency."""
        limit = self._load.concurrency
        gate = asyncio.Semaphore(limit or len(conversations) or 1)
        running: set[asyncio.Task[None]] = set()

        async def arrive(turns: Sequence[tuple[int, TrafficRequest]], intended_ns: int) -> None:
            records[turns[0][0]].scheduled = True
            if limit:  # a place is taken when the time has come
                await self._timers.until(intended_ns)
            async with gate:
                await self._converse(turns, records, intended_ns)

        try:
            before_ns = 0
            for turns, offset in zip(conversations, self._load.offsets or (), strict=True):
                intended_ns = start_ns + round(offset * 1e9)
                # Begun one arrival early, so that at its time only the send is left to do.
                task = asyncio.ensure_future(arrive(turns, intended_ns))
                running.add(task)
                task.add_done_callback(running.discard)
                await asyncio.sleep(0)
                await self._timers.until(before_ns)
                before_ns = intended_ns
            while running:
                await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running, timeout=CANCEL_TIMEOUT)

    async def _converse(
        self, turns: Sequence[tuple[int, TrafficRequest]], records: dict[int, RequestRecord], intended_ns: int
    ) -> None:
        """Send the turns of a conversation after each other; each prompt holds the prompts and answers before it."""
        before: TrafficRequest | None = None
        for index, turn in turns:
            record, request = records[index], turn
            if before is None:
                message = self._messages.pop(index)
            else:
                intended_ns = time.monotonic_ns()
                request = self._continued(before, self._arrived[index - 1], turn)
                record.input_tokens = len(request.token_ids)
                message = self._transport.encode(request, f"{self._run}-{index}")
            record.intended_ns = intended_ns
            await self._send(record, message, request)
            if record.status == "failed":
                return
            before = request

    async def _send(self, record: RequestRecord, message: Any, request: TrafficRequest) -> None:
        received: list[Chunk] = []
        self._arrived[record.index] = received
        await self._timers.until(record.intended_ns)
        self._live.sent()
        record.sent_ns = time.monotonic_ns()
        try:
            await self._transport.send(message, received, limit=request.cancel_after)
            record.status = "completed"
            if request.cancel_after is not None and len(received) >= request.cancel_after:
                record.status, record.error = _CANCELLED
        except (SendError, ServerUnreachableError) as error:
            record.status, record.error = "failed", str(error)
        except asyncio.CancelledError:
            record.status, record.error = self._cut_off
            raise
        finally:
            record.ended_ns = time.monotonic_ns()
            first_ms = (received[0][0] - record.intended_ns) / 1e6 if received else None
            self._live.ended(failed=record.status == "failed", first_ms=first_ms)

    def _continued(self, before: TrafficRequest, answer: list[Chunk], turn: TrafficRequest) -> TrafficRequest:
        """Return `turn` with the conversation so far before its prompt."""
        import numpy as np

        responses = [self._transport.read(chunk) for chunk in answer]
        ids = [token for each in responses for token in each.ids]
        # Texts are counted by the server; an answer in text adds as many ids as it was asked for.
        ids = ids or [0] * before.output_len
        text = None
        if turn.text is not None:
            text = f"{before.text}{''.join(each.text or '' for each in responses)} {turn.text}"
        token_ids = np.concatenate([before.token_ids, np.array(ids, np.int32), turn.token_ids])
        return replace(turn, token_ids=token_ids, text=text)

    def _decode(self, records: Any) -> None:
        """Read what arrived, and judge which answers are complete."""
        for record in records:
            responses = [self._transport.read(chunk) for chunk in self._arrived.pop(record.index, ())]
            text = self._load.target.openai is not None or takes_text(self._load.target.model)
            record.finish_reason = next((each.finish_reason for each in responses if each.finish_reason), None)
            if text:
                record.responses = responses
            else:
                repeats = not record.streamed and repeats_prompt(self._load.target.model)
                repeated = record.input_tokens if repeats else 0
                record.arrivals = [(e.time_ns, n) for e in responses if (n := (e.tokens or 0) - repeated) > 0]
            error = next((each.error for each in responses if each.error), None)
            if error is not None:
                record.status, record.error = "failed", error
            answered = record.arrivals or any(each.text or each.tokens for each in responses) or self._load.may_be_empty
            if record.status == "completed" and not answered:
                record.status, record.error = "failed", "answer without tokens"


_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_SECOND = 1_000_000_000
_LEAD = 300_000
_LONG = 10 * _LEAD  # so that polling takes at most a tenth of a core


class _Setting(ctypes.Structure):
    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


class Timers:
    """Calls functions of the running event loop at absolute times, by one timerfd (Python has its own since 3.13)."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._ring)
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._awake = False

    def call_at(self, time_ns: int, function: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_ns, next(self._numbers), function))
        if self._due[0][0] == time_ns and not self._awake:
            self._set()

    async def until(self, time_ns: int) -> None:
        """Return at `time_ns` of the monotonic clock, or at once when that is over."""
        if time_ns > time.monotonic_ns():
            due = self._loop.create_future()
            self.call_at(time_ns, lambda: None if due.done() else due.set_result(None))
            await due

    def _set(self) -> None:
        due = self._due[0][0]
        moment = due - _LEAD if due - time.monotonic_ns() > _LONG else due
        wanted = _Setting(value=divmod(moment, _SECOND))
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(wanted), None)

    def _ring(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._file, 8)
        if not self._awake:
            self._call_due()

    def _call_due(self) -> None:
        self._awake = True
        try:
            while self._due and self._due[0][0] <= time.monotonic_ns():
                heapq.heappop(self._due)[2]()
        finally:
            # After the tasks that were woken just now: setting the timer takes 30 µs on a cold processor.
            self._loop.call_soon(self._sleep)

    def _sleep(self) -> None:
        """Wait for what is due next, or go on polling when that is soon."""
        if self._due and self._due[0][0] - time.monotonic_ns() <= _LEAD:
            self._call_due()
            return
        self._awake = False
        if self._due:
            self._set()

    def close(self) -> None:
        """Forget what is due, and release the timer."""
        self._loop.remove_reader(self._file)
        os.close(self._file)
        self._due.clear()


_BEFORE_START = 0.05  # seconds between the decision to start and the start
_END_TIMEOUT = 60.0  # for workers to decode and hand over their records after an interrupt


@dataclass(frozen=True, kw_only=True)
class LoadOutcome:
    """Records in the order of the requests, and how the run ended."""

    records: list[RequestRecord]
    interrupted: bool = False  # by the user
    timed_out: bool = False  # by the time limit
    health: Sequence[WorkerHealth] = ()
    start_ns: int = 0  # time 0 of the schedule


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
            start_ns = time.monotonic_ns() + round(_BEFORE_START * 1e9)
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
        with halted_workers_end(lambda: [each.pid for each in self._processes if each.pid is not None]) as halted:
            return self._answers(halted)

    def _answers(self, halted: Collection[int]) -> list[Any]:
        answers: dict[Connection, Any] = {}
        deadline: float | None = None
        while len(answers) < len(self._pipes):
            waiting = [pipe for pipe in self._pipes if pipe not in answers]
            try:
                for pipe in wait(waiting, timeout=0.5):
                    answers[pipe] = _received(pipe, halted)  # type: ignore[index, arg-type]
            except KeyboardInterrupt:
                self.interrupted = True
                deadline = time.monotonic() + _END_TIMEOUT
                for pipe in self._pipes:
                    with suppress(OSError):
                        pipe.send(None)
            if deadline is not None and time.monotonic() > deadline:
                raise BenchmarkError(f"Workers did not end within {_END_TIMEOUT:g} s after the interrupt.")
        return [answers[pipe] for pipe in self._pipes]


def _received(pipe: Connection, halted: Collection[int]) -> Any:
    try:
        answer = pipe.recv()
    except (EOFError, OSError):  # in the middle of an answer
        if halted:
            raise BenchmarkError(f"A worker process {HALTED}, and was ended: measure again.") from None
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

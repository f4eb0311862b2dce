"""How requests are sent and answers timed: one asyncio loop, one gRPC stream per request, absolute times.

asyncio on the stub of tritonclient, because the client shares the machine with the server: on 8 streams of a model that
does no work it took 35–40 µs of CPU per response, a thread per stream 55–60, tritonclient's own client 80–130.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from trtserve.bench.messages import (
    TextResponse,
    finish_reason,
    repeats_prompt,
    request_message,
    takes_text,
    text_response,
    token_count,
)
from trtserve.bench.traffic import TrafficRequest
from trtserve.triton.call_errors import explain_rpc_error, plain, silent
from trtserve.triton.client import CHANNEL_OPTIONS, Endpoint, ModelDescription

CANCEL_TIMEOUT = 5.0

Status = Literal["completed", "failed", "cancelled"]


@dataclass(kw_only=True)
class Record:
    """What happened to one offered request; times are nanoseconds of the monotonic clock.

    `intended` is the time of the schedule (closed loop: the actual send), `sent` is None when it never left. `arrivals`
    holds time and number of tokens of every response that carried tokens. `finish_reason` says why the answer ended,
    where the model tells it. `texts` are the responses of a text model, whose tokens are counted after the run, so that
    no tokenizer works beside the load.
    """

    index: int
    input_tokens: int
    requested_tokens: int
    intended: int = 0
    sent: int | None = None
    ended: int = 0
    status: Status = "cancelled"
    error: str | None = None
    scheduled: bool = False
    streamed: bool = False
    finish_reason: str | None = None
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    texts: list[TextResponse] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        """Generated tokens received."""
        return sum(tokens for _, tokens in self.arrivals)


_INTERRUPTED: tuple[Status, str] = ("cancelled", "interrupted")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What to send to which model: `offsets` are seconds after the start (open loop), None is a closed loop.

    `may_be_empty`: an answer without a token is none too few, since the model may end at once.
    """

    endpoint: Endpoint
    model: ModelDescription
    requests: Sequence[TrafficRequest]
    warmup: Sequence[TrafficRequest] = ()
    offsets: Sequence[float] | None = None
    concurrency: int | None = None
    timeout: float = 600.0
    may_be_empty: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Records in the order of the requests; `interrupted`: the user ended the run, `timed_out`: the time limit did."""

    records: list[Record]
    interrupted: bool
    timed_out: bool


def run_load(load: Load, *, on_end: Callable[[], None] = lambda: None) -> Outcome:
    """Send the warm-up, then the measured requests; SIGINT cancels what is in flight and returns what was measured.

    Ends after `load.timeout` seconds at the latest: requests in flight then count as failed, the others as not sent.
    Errors: ServerUnreachableError when there is no connection, RequestError when the warm-up fails.
    """
    return asyncio.run(_Sender(load, on_end).run())


class _Sender:
    """One run of a load over one channel."""

    def __init__(self, load: Load, on_end: Callable[[], None]) -> None:
        self._load = load
        self._on_end = on_end
        self._stub: Any = None
        self._cut_off = _INTERRUPTED

    async def run(self) -> Outcome:
        import grpc
        from tritonclient.grpc import service_pb2_grpc

        async with grpc.aio.insecure_channel(self._load.endpoint.grpc, options=CHANNEL_OPTIONS) as channel:
            await self._connect(channel)
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            stop = asyncio.Event()
            with _interrupts(stop):
                return await self._run_windows(stop)

    async def _connect(self, channel: Any) -> None:
        try:
            await asyncio.wait_for(channel.channel_ready(), self._load.endpoint.connect_timeout)
        except asyncio.TimeoutError:
            raise silent(self._load.endpoint.grpc, self._load.endpoint.connect_timeout) from None

    async def _run_windows(self, stop: asyncio.Event) -> Outcome:
        load = self._load
        warmup, records = _records(load.warmup), _records(load.requests)
        if warmup:
            await self._bounded(self._closed(warmup, load.warmup), stop)
        _check_warmup(warmup, stop)
        timed_out = False
        if not stop.is_set():
            window = self._closed if load.offsets is None else self._open
            timed_out = await self._bounded(window(records, load.requests), stop)
        return Outcome(records=records, interrupted=stop.is_set(), timed_out=timed_out)

    async def _bounded(self, work: Any, stop: asyncio.Event) -> bool:
        """Do `work` until its end, the user's interrupt or the time limit; whether it was the limit."""
        self._cut_off = _INTERRUPTED
        task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
        await asyncio.wait({task, stopping}, timeout=self._load.timeout, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if task.done():
            task.result()
            return False
        timed_out = not stop.is_set()
        if timed_out:
            self._cut_off = ("failed", f"not answered when the benchmark's {self._load.timeout:g} s were over")
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_TIMEOUT)
        return timed_out

    async def _closed(self, records: Sequence[Record], requests: Sequence[TrafficRequest]) -> None:
        """`concurrency` users, each sending its next request when its last one has ended."""
        pending = iter(zip(records, self._encoded(requests), strict=True))

        async def user() -> None:
            for record, message in pending:
                record.intended = time.monotonic_ns()
                await self._send(record, message)

        await asyncio.gather(*(user() for _ in range(self._load.concurrency or 1)))

    async def _open(self, records: Sequence[Record], requests: Sequence[TrafficRequest]) -> None:
        """Every request at its own time of the schedule; a cap makes it wait, and the wait counts."""
        messages = self._encoded(requests)
        gate = asyncio.Semaphore(self._load.concurrency or len(records))
        start = time.monotonic_ns()

        async def arrive(record: Record, message: Any, offset: float) -> None:
            record.scheduled, record.intended = True, start + round(offset * 1e9)
            await asyncio.sleep((record.intended - time.monotonic_ns()) / 1e9)
            async with gate:
                await self._send(record, message)

        await asyncio.gather(*map(arrive, records, messages, self._load.offsets or ()))

    def _encoded(self, requests: Sequence[TrafficRequest]) -> list[Any]:
        """Messages made before the window, so that encoding does not delay a send."""
        run = uuid.uuid4().hex
        return [
            request_message(self._load.model, request, request_id=f"{run}-{index}")
            for index, request in enumerate(requests)
        ]

    async def _send(self, record: Record, message: Any) -> None:
        import grpc

        record.streamed = self._load.model.decoupled
        record.sent = time.monotonic_ns()
        try:
            await (self._stream(record, message) if record.streamed else self._unary(record, message))
            tokens = record.arrivals or any(each.text or each.tokens for each in record.texts)
            answered = tokens or self._load.may_be_empty
            record.status, record.error = ("completed", None) if answered else ("failed", "answer without tokens")
        except _RefusedError as error:
            record.status, record.error = "failed", str(error)
        except grpc.aio.AioRpcError as error:
            record.status, record.error = "failed", str(explain_rpc_error(error, self._load.endpoint.grpc))
        except asyncio.CancelledError:
            record.status, record.error = self._cut_off
            raise
        finally:
            record.ended = time.monotonic_ns()
            self._on_end()

    async def _stream(self, record: Record, message: Any) -> None:
        call = self._stub.ModelStreamInfer([message], timeout=self._load.timeout)
        try:
            async for response in call:
                now = time.monotonic_ns()
                if response.error_message:
                    raise _RefusedError(plain(response.error_message))
                self._note(record, response.infer_response, now)
        finally:
            call.cancel()

    async def _unary(self, record: Record, message: Any) -> None:
        call = self._stub.ModelInfer(message, timeout=self._load.timeout)
        try:
            response = await call
        finally:
            call.cancel()
        self._note(record, response, time.monotonic_ns())

    def _note(self, record: Record, response: Any, now: int) -> None:
        record.finish_reason = finish_reason(response) or record.finish_reason
        if takes_text(self._load.model):
            record.texts.append(text_response(response, time=now))
            return
        repeated = not record.streamed and repeats_prompt(self._load.model)
        tokens = token_count(response) - (record.input_tokens if repeated else 0)
        if tokens > 0:
            record.arrivals.append((now, tokens))


class _RefusedError(Exception):
    """The server answered with an error inside the stream."""


def _records(requests: Sequence[TrafficRequest]) -> list[Record]:
    return [
        Record(index=index, input_tokens=len(request.token_ids), requested_tokens=request.output_len)
        for index, request in enumerate(requests)
    ]


def _check_warmup(records: Sequence[Record], stop: asyncio.Event) -> None:
    """A server that cannot answer the warm-up is not worth measuring."""
    from trtserve.errors import RequestError

    failed = [record for record in records if record.status == "failed"]
    if records and len(failed) == len(records) and not stop.is_set():
        raise RequestError(f"All {len(records)} warm-up requests failed; the first: {failed[0].error}")


@contextmanager
def _interrupts(stop: asyncio.Event) -> Iterator[None]:
    """Turn SIGINT into `stop` meanwhile; only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    previous = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, previous)

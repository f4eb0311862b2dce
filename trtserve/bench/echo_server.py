"""A server that computes nothing and answers at known times, over the protocols that `bench` measures with.

It tells how fast this machine's client is, and the tests what the truth is. It must cost less than the client that it
measures: it reads no content, and its gRPC is the few frames of HTTP/2 that an answer needs (RFC 9113).
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import signal
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import uvloop

from trtserve.bench.worker import Timers
from trtserve.errors import BenchmarkError

_START_TIMEOUT = 30.0

Spoken = Literal["grpc-stream", "grpc-unary", "http-stream", "http", "openai-stream", "openai"]


@dataclass(frozen=True, kw_only=True)
class Echo:
    """What the server answers, and when."""

    spoken: Spoken
    chunks: int = 16  # responses of an answer, each sent by a write of its own
    delay: float = 0.0  # seconds from a request to the first response
    gap: float = 0.0  # seconds between responses
    stall_at: float | None = None  # seconds after the first request at which the server freezes
    stall: float = 0.0  # seconds for which it is frozen: neither reads nor answers
    text: bool = False  # whether the answers are text instead of token ids


@contextmanager
def running_echo(echo: Echo) -> Iterator[int]:
    """Run the server in a process of its own on the loopback, and yield its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(echo, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_TIMEOUT):
            raise BenchmarkError(f"The built-in echo server did not start within {_START_TIMEOUT:g} s.")
        yield ours.recv()
    finally:
        ours.close()
        process.terminate()
        process.join()


def _serve(echo: Echo, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(_listen(echo, pipe))


async def _listen(echo: Echo, pipe: Connection) -> None:
    loop, timers = asyncio.get_running_loop(), Timers()
    answers = _Answers(echo, timers)
    kind = _Http2 if echo.spoken.startswith("grpc") else _Http
    server = await loop.create_server(lambda: kind(answers), "127.0.0.1", 0, backlog=1024)
    # The pipe ends with the process that started this one, which may be gone already. It is watched only afterwards:
    # uvloop does not close while it watches a broken pipe.
    with suppress(BrokenPipeError):
        pipe.send(server.sockets[0].getsockname()[1])
        ended = asyncio.Event()
        loop.add_reader(pipe.fileno(), ended.set)
        await ended.wait()
        loop.remove_reader(pipe.fileno())


class _Answers:
    def __init__(self, echo: Echo, timers: Timers) -> None:
        self.echo, self.timers = echo, timers
        self.parts = _parts(echo)
        self._first_ns: int | None = None

    def begin(self, send: Any, end: Any) -> None:
        """Call `send` with each part at its time, then `end`."""
        now = time.monotonic_ns()
        echo = self.echo
        if self._first_ns is None:
            self._first_ns = now
            if echo.stall_at is not None:
                self.timers.call_at(now + round(echo.stall_at * 1e9), lambda: time.sleep(echo.stall))
        if not echo.delay and not echo.gap:
            for part in self.parts:
                send(part)
            end()
            return
        for number, part in enumerate(self.parts):
            due = now + round((echo.delay + number * echo.gap) * 1e9)
            self.timers.call_at(due, lambda part=part: send(part))  # type: ignore[misc]
        self.timers.call_at(now + round((echo.delay + (len(self.parts) - 1) * echo.gap) * 1e9), end)


def _parts(echo: Echo) -> list[bytes]:
    if echo.spoken.startswith("grpc"):
        return [_grpc_message(echo)] * (1 if echo.spoken == "grpc-unary" else echo.chunks)
    if echo.spoken.startswith("openai"):
        usage = {"prompt_tokens": 1, "completion_tokens": echo.chunks}
        if echo.spoken == "openai":
            return [json.dumps({"choices": [{"text": " a" * echo.chunks}], "usage": usage}).encode()]
        token = {"choices": [{"index": 0, "text": " a", "finish_reason": None}]}
        last = [{"choices": [], "usage": usage}]
        return [*(_event(each) for each in [token] * echo.chunks + last), b"data: [DONE]\n\n"]
    values = {"text_output": " a"} if echo.text else {"output_ids": 7, "sequence_length": 1}
    if echo.spoken == "http":
        whole = {"text_output": " a" * echo.chunks} if echo.text else {"output_ids": [7] * echo.chunks}
        return [json.dumps({"model_name": "echo", "model_version": "1", **whole}).encode()]
    return [_event({"model_name": "echo", "model_version": "1", **values})] * echo.chunks


def _event(values: Any) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def _grpc_message(echo: Echo) -> bytes:
    from tritonclient.grpc import service_pb2

    unary = echo.spoken == "grpc-unary"
    tokens = echo.chunks if unary else 1
    response = service_pb2.ModelInferResponse(model_name="echo", model_version="1")
    if echo.text:
        text = (" a" * tokens).encode()
        response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        response.raw_output_contents.append(struct.pack("<I", len(text)) + text)
    else:
        response.outputs.add(name="output_ids", datatype="INT32", shape=[1, 1, tokens])
        response.raw_output_contents.append(struct.pack("<i", 7) * tokens)
    message = response if unary else service_pb2.ModelStreamInferResponse(infer_response=response)
    encoded: bytes = message.SerializeToString()
    return struct.pack(">BI", 0, len(encoded)) + encoded


class _Http(asyncio.Protocol):
    """HTTP/1.1 with kept-alive connections; streams are chunked, one chunk for each event."""

    def __init__(self, answers: _Answers) -> None:
        self._answers, self._buffer = answers, b""
        self._streams = answers.echo.spoken.endswith("-stream")

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=0)  # uvloop joins writes otherwise

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            start = head.find(b"content-length:")
            length = int(head[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._answer()

    def _answer(self) -> None:
        def write(part: bytes) -> None:
            if not self._transport.is_closing():  # else the client cancelled the request
                self._transport.write(part)

        if not self._streams:
            (body,) = self._answers.parts[:1]
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            self._answers.begin(lambda part: write(head + part), lambda: None)
            return
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        write(head)
        self._answers.begin(lambda part: write(b"%x\r\n%b\r\n" % (len(part), part)), lambda: write(b"0\r\n\r\n"))


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_INITIAL_WINDOW = 4
_WIDEST = 2**31 - 1
_DEFAULT_WINDOW = 65535
# HPACK without tables: ":status: 200" by its number, the others as literals.
_RESPONSE = b"\x88\x0f\x10\x10application/grpc"
_TRAILERS = b"\x00\x0bgrpc-status\x010"


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


class _Http2(asyncio.Protocol):
    """gRPC: each request ends with its first message, and gets the same messages."""

    def __init__(self, answers: _Answers) -> None:
        self._answers, self._buffer, self._greeted = answers, b"", False
        self._window, self._initial = _DEFAULT_WINDOW, _DEFAULT_WINDOW
        self._windows: dict[int, int] = {}
        self._blocked: deque[tuple[int, bytes]] = deque()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        settings = struct.pack(">HI", _INITIAL_WINDOW, _WIDEST)
        widen = struct.pack(">I", _WIDEST - _DEFAULT_WINDOW)
        transport.write(_frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW, 0, 0, widen))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data
        place = 0
        if not self._greeted:
            if len(buffer) < len(_PREFACE):
                self._buffer = buffer
                return
            self._greeted, place = True, len(_PREFACE)
        while len(buffer) - place >= 9:
            length = int.from_bytes(buffer[place : place + 3], "big")
            if len(buffer) - place - 9 < length:
                break
            kind, flags = buffer[place + 3], buffer[place + 4]
            stream = int.from_bytes(buffer[place + 5 : place + 9], "big") & _WIDEST
            self._on_frame(kind, flags, stream, buffer[place + 9 : place + 9 + length])
            place += 9 + length
        self._buffer = buffer[place:]

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _HEADERS:
            self._windows[stream] = self._initial
        elif kind == _WINDOW:
            more = int.from_bytes(payload, "big")
            if stream == 0:
                self._window += more
            elif stream in self._windows:
                self._windows[stream] += more
            self._flush()
        elif kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _RESET:
            self._windows.pop(stream, None)
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            self._answer(stream)

    def _on_settings(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _INITIAL_WINDOW:
                for stream in self._windows:
                    self._windows[stream] += value - self._initial
                self._initial = value
        self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
        self._flush()

    def _answer(self, stream: int) -> None:
        self._transport.write(_frame(_HEADERS, _END_HEADERS, stream, _RESPONSE))
        self._answers.begin(lambda part: self._send(stream, part), lambda: self._send(stream, b""))

    def _send(self, stream: int, message: bytes) -> None:
        """Send a message within the windows, or with b"" the end of an answer."""
        if self._blocked or not self._fits(stream, message):
            self._blocked.append((stream, message))
        else:
            self._write(stream, message)

    def _fits(self, stream: int, message: bytes) -> bool:
        return len(message) <= min(self._window, self._windows.get(stream, _WIDEST))

    def _write(self, stream: int, message: bytes) -> None:
        if stream not in self._windows or self._transport.is_closing():
            return  # cancelled by the client
        if not message:
            self._transport.write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, _TRAILERS))
            del self._windows[stream]
            return
        self._window -= len(message)
        self._windows[stream] -= len(message)
        self._transport.write(_frame(_DATA, 0, stream, message))

    def _flush(self) -> None:
        while self._blocked and self._fits(*self._blocked[0]):
            self._write(*self._blocked.popleft())

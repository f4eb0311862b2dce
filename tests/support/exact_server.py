"""A server that answers at an exactly known time after a request: measured from the request's arrival in the kernel.

A program that sleeps notices a request 0.1 to 0.3 ms late on an idle processor. A server that counts its delay from
then on hands that time to its clients, and a load generator cannot be told from it. This one asks the kernel when the
request arrived (SO_TIMESTAMPNS, socket(7)), and reports how long each answer really took.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from trtserve.bench.worker import Timers

_START_TIMEOUT = 60.0
_SO_TIMESTAMPNS = 35
_EVENT = b'data: {"model_name": "echo", "model_version": "1", "output_ids": 7, "sequence_length": 1}\n\n'
_ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(_EVENT), _EVENT)
)


@contextmanager
def exact_server(delay: float, *, processor: int) -> Iterator[tuple[int, Callable[[], list[int]]]]:
    """Run the server on one processor; yield its port, and what returns the ns that its answers took, in order.

    Every POST gets one event of Triton's generate_stream, `delay` seconds after its last byte arrived.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(delay, processor, theirs), daemon=True)
    process.start()
    theirs.close()

    def taken() -> list[int]:
        ours.send(None)
        times: list[int] = ours.recv()
        return times

    try:
        assert ours.poll(_START_TIMEOUT), "the server did not start"
        yield ours.recv(), taken
    finally:
        ours.close()
        process.terminate()
        process.join()


def _serve(delay: float, processor: int, pipe: Connection) -> None:
    os.sched_setaffinity(0, {processor})
    uvloop.run(_listen(round(delay * 1e9), pipe))


async def _listen(delay_ns: int, pipe: Connection) -> None:
    loop, timers = asyncio.get_running_loop(), Timers()
    written: list[tuple[int, int]] = []
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listening.setblocking(False)
    # Here already, since the kernel takes a moment to begin with it.
    listening.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

    def accept() -> None:
        connection, _ = listening.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        loop.add_reader(connection, _Receiver(connection, answer))

    def answer(connection: socket.socket, arrived_ns: int) -> None:
        def write() -> None:
            written.append((arrived_ns, time.monotonic_ns()))
            connection.send(_ANSWER)

        timers.call_at(arrived_ns + delay_ns, write)

    loop.add_reader(listening, accept)
    ended = loop.create_future()

    def report() -> None:
        try:
            pipe.recv()
        except EOFError:  # the process that started this one has ended
            loop.remove_reader(pipe.fileno())
            ended.set_result(None)
        else:
            os.set_blocking(pipe.fileno(), True)  # uvloop made it non-blocking
            pipe.send([end - begin for begin, end in sorted(written)])

    loop.add_reader(pipe.fileno(), report)
    pipe.send(listening.getsockname()[1])
    await ended


class _Receiver:
    """Reads the requests of one connection, one at a time."""

    def __init__(self, connection: socket.socket, answer: Callable[[socket.socket, int], Any]) -> None:
        self._connection, self._answer, self._buffer = connection, answer, b""

    def __call__(self) -> None:
        data, ancillary, _, _ = self._connection.recvmsg(1 << 16, 64)
        if not data:
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection.close()
            return
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if found and len(body) >= length:
            self._buffer = b""
            seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
            wall_to_monotonic = time.monotonic_ns() - time.time_ns()
            self._answer(self._connection, seconds * 10**9 + nanoseconds + wall_to_monotonic)

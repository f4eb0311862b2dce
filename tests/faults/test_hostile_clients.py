"""Clients that leave their answers unread, stop in the middle of a request, or connect without end."""

from __future__ import annotations

import json
import multiprocessing
import resource
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import psutil
import pytest

from tests.support.servers import HOST
from tests.support.supervised import Supervised, measured, supervised
from tests.support.waiting import wait_until
from trtserve.triton.stub_probe import write_probe_repository

pytestmark = pytest.mark.triton

SLOW, HALF_OPEN, FLOODS = 1_000, 800, 10
ANSWER = 1_000_000
MOST_MEMORY = 2**30


def request_of(size: int) -> bytes:
    """An inference request whose answer repeats a string of `size` bytes."""
    inputs = [
        {"name": "STRINGS", "shape": [1], "datatype": "BYTES", "data": ["x" * size]},
        {"name": "INTEGERS", "shape": [1], "datatype": "INT32", "data": [1]},
    ]
    body = json.dumps({"inputs": inputs}).encode()
    head = f"POST /v2/models/probe/infer HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def latencies(one: Supervised, count: int = 300) -> list[float]:
    """Seconds of requests one after the other, all of which are answered."""
    taken = []
    for _ in range(count):
        begin = time.monotonic()
        assert one.ask() == 200
        taken.append(time.monotonic() - begin)
    return taken


@contextmanager
def flood(port: int) -> Iterator[None]:
    """Connect and leave without end, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(target=connect_and_leave, args=(port, begun), daemon=True)
    process.start()
    assert begun.wait(60)
    try:
        yield
    finally:
        process.terminate()
        process.join()


def connect_and_leave(port: int, begun: Event) -> None:
    """Do so in ten threads until the process is ended."""

    def connect() -> None:
        while True:
            with suppress(OSError):
                socket.create_connection((HOST, port), timeout=10).close()
                begun.set()

    for _ in range(FLOODS):
        threading.Thread(target=connect).start()


def test_other_clients_notice_nothing(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    repository = write_probe_repository(tmp_path / "probe")
    with supervised(repository, tmp_path / "home") as one, ExitStack() as connections:
        instance = one.ready().instances[0]
        assert instance.door is not None
        door = psutil.Process(instance.door.process.pid)
        port = one.record().endpoint.http_port

        def connected() -> socket.socket:
            client = connections.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(60)
            client.connect((HOST, port))
            return client

        latencies(one)
        found = {"quiet": latencies(one)}
        for _ in range(SLOW):
            connected().sendall(request_of(ANSWER))
        wait_until(lambda: all(one.ask() == 200 for _ in range(20)), 120)  # the door has received them all
        found["slow readers"] = latencies(one)
        for number in range(HALF_OPEN):
            connected().sendall(request_of(1)[: 20 if number % 2 else -10])
        found["half-open"] = latencies(one)
        with flood(port):
            found["flood"] = latencies(one)
        memory = door.memory_info().rss
        assert memory < MOST_MEMORY
        assert one.state() == "ready"
    for clients, taken in found.items():
        hundredths = statistics.quantiles(taken, n=100)
        measured("clients", clients=clients, p50_ms=1000 * hundredths[49], p99_ms=1000 * hundredths[98])
    measured("clients", door_memory_mib=memory / 2**20)

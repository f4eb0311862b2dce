"""Clients that leave their answers unread, stop in the middle of a request, or connect without end."""

from __future__ import annotations

import json
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.servers import HOST
from tests.support.supervised import Supervised, measured, supervised
from tests.support.waiting import wait_until
from trtserve.server.doctor.stub import write_probe_repository

pytestmark = pytest.mark.triton

SLOW, HALF_OPEN, FLOODS = 1_000, 800, 10
FLOOD_RATES = (2_000, 4_000, 8_000, 0)
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


def latencies(one: Supervised, count: int = 1_000) -> list[float]:
    """Seconds of requests one after the other, all of which are answered."""
    taken = []
    for _ in range(count):
        begin = time.monotonic()
        assert one.ask() == 200
        taken.append(time.monotonic() - begin)
    return taken


# Each thread has an address of its own. A flood from one address would use up its ports, and then the kernel's search
# for a free one slows the other clients too.
FLOOD = """
import socket, sys, threading, time

host, port, threads, rate = sys.argv[1], *map(int, sys.argv[2:])
IP_BIND_ADDRESS_NO_PORT = 24

def connect_and_leave(address):
    due = time.monotonic()
    while True:
        with socket.socket() as client:
            client.settimeout(10)
            client.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            client.bind((address, 0))
            try:
                client.connect((host, port))
            except OSError:
                pass
        if rate:
            due += threads / rate
            time.sleep(max(0, due - time.monotonic()))

for number in range(threads):
    threading.Thread(target=connect_and_leave, args=(f"127.0.1.{number + 1}",)).start()
print("begun", flush=True)
"""


OTHER_PROGRAM = """
import socket, sys

with socket.create_server((sys.argv[1], 0), backlog=2048) as listening:
    print(listening.getsockname()[1], flush=True)
    while True:
        listening.accept()[0].close()
"""


@contextmanager
def other_program() -> Iterator[int]:
    """The port of a program that has nothing to do with the server: it accepts connections and closes them."""
    with subprocess.Popen((sys.executable, "-c", OTHER_PROGRAM, HOST), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextmanager
def flood(port: int, rate: int) -> Iterator[None]:
    """Connect and leave `rate` times a second, 0 for as often as possible, in a process of its own."""
    command = (sys.executable, "-c", FLOOD, HOST, str(port), str(FLOODS), str(rate))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def test_other_clients_notice_nothing(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    repository = write_probe_repository(tmp_path / "probe")
    with supervised(repository, tmp_path / "home") as one, ExitStack() as connections:
        instance = one.ready().instances[0]
        assert instance.gateway is not None
        gateway = psutil.Process(instance.gateway.process.pid)
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
        wait_until(lambda: all(one.ask() == 200 for _ in range(20)), 120)  # the gateway has received them all
        found["slow readers"] = latencies(one)
        for number in range(HALF_OPEN):
            connected().sendall(request_of(1)[: 20 if number % 2 else -10])
        found["half-open"] = latencies(one)
        for rate in FLOOD_RATES:
            with flood(port, rate):
                found[f"flood of {rate or 'all that fit'} a second"] = latencies(one)
        # What a flood takes from others by using the same cores, whoever receives it.
        with other_program() as elsewhere, flood(elsewhere, 0):
            found["flood of another program"] = latencies(one)
        memory = gateway.memory_info().rss
        assert memory < MOST_MEMORY
        assert one.state() == "ready"
    for clients, taken in found.items():
        hundredths = statistics.quantiles(taken, n=100)
        measured("clients", clients=clients, p50_ms=1000 * hundredths[49], p99_ms=1000 * hundredths[98])
    measured("clients", gateway_memory_mib=memory / 2**20)

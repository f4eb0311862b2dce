"""What the gateway costs for a streamed token, and how many it passes on, with one process and with several.

An engine that costs next to nothing (tests/support/fast_engine.py) sends a token to every stream in each step. A client
of raw sockets reads the events. Both need processor time too, so that the tokens per second are what this machine has
left for the gateway; its processor time for a token is the figure that another machine can be judged by.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.frame import Row, benchmark_parser, compare, finish, spread, table
from tests.support.commands import trtserve
from tests.support.gateways import HOST, RunningGateway, running_gateway
from tests.support.waiting import wait_until
from trtserve.gateway.settings import RequestLimits
from trtserve.host.ports import free_ports
from trtserve.server.repositories import find_repository
from trtserve.store import Store

STREAMS = 512
NEW = 100
"""Tokens of each answer."""
STEP = 0.002
_TAIL = 600
PROCESSES = 2


def read_all(port: int, path: str, body: dict[str, object], streams: int) -> float:
    """Ask as many streams at once, and return the seconds until the last one has ended."""
    options = {"max_tokens": NEW, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    content = json.dumps({"model": "demo", **options, **body}).encode()
    headers = {"Host": HOST, "Content-Type": "application/json", "Content-Length": len(content)}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection((HOST, port))) for _ in range(streams)]
        poll = select.epoll()
        stack.callback(poll.close)
        began = time.perf_counter()
        ends = {}
        for each in sockets:
            each.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
            poll.register(each, select.EPOLLIN)
            ends[each.fileno()] = (each, bytearray())
        while ends:
            for number, _ in poll.poll(60):
                each, end = ends[number]
                data = each.recv(1 << 16)
                end[:] = (end + data)[-_TAIL:]
                assert data, bytes(end)
                if b"data: [DONE]" in end:
                    assert b'"completion_tokens":%d' % NEW in end, bytes(end)
                    poll.unregister(each)
                    del ends[number]
        return time.perf_counter() - began


def seconds_of(gateway: RunningGateway) -> float:
    """Return the processor time of a gateway and its processes so far."""
    root = psutil.Process(gateway.process.pid)
    times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


@contextmanager
def gateways(
    work: Path, counts: Sequence[int], *, engines: int = 1, streams: int = STREAMS
) -> Iterator[list[RunningGateway]]:
    """Yield a gateway with each number of processes, in front of `engines` each."""
    home = work / "gateway-home"
    trtserve("import", "demo", "--name", "demo", home=home)
    repository = find_repository("demo", store=Store(home)).path
    (tokenizer,) = (Path(record.model) for record in Store(home).recorded() if record.name == "demo")
    with ExitStack() as stack:
        found = []
        for count in counts:
            port, *others = ports = free_ports(HOST, engines)
            for each in ports:
                command = [sys.executable, "-m", "tests.support.fast_engine", str(repository), str(each), str(STEP)]
                engine = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
                stack.callback(engine.kill)
                assert engine.stdout is not None
                assert engine.stdout.readline() == b"ready\n"
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options: dict[str, Any] = {"own": False, "model": "", "tokenizer": tokenizer, "processes": count}
            options |= {"replicas": tuple(f"{HOST}:{each}" for each in others)}
            options |= {"limits": RequestLimits(requests=max(RequestLimits.requests, 2 * streams))}
            gateway = stack.enter_context(running_gateway(folder, port, grpc_port=port, live=False, **options))
            wait_until(partial(answers, gateway.port))
            found.append(gateway)
        yield found


def answers(port: int) -> bool:
    """Return whether a stream runs to its end; the first ones wait for the tokenizer."""
    try:
        read_all(port, "/v1/completions", {"prompt": "a"}, 8)
    except (OSError, AssertionError):
        return False
    return True


def measure(work: Path, pairs: int, streams: int) -> list[Row]:
    """Return tokens per second of several processes against one, and what a token costs each of them."""
    rows = []
    with gateways(work, (1, PROCESSES)) as (one, several):
        bodies: dict[str, dict[str, object]] = {
            "/v1/completions": {"prompt": "What is machine learning?"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is machine learning?"}]},
        }
        for path, body in bodies.items():
            costs: dict[int, list[float]] = {one.port: [], several.port: []}

            def rate(gateway: RunningGateway, path: str = path, body: dict[str, object] = body) -> float:
                before = seconds_of(gateway)
                seconds = read_all(gateway.port, path, body, streams)
                costs[gateway.port].append(1000 * (seconds_of(gateway) - before) / streams / NEW)  # noqa: B023
                return streams * NEW / seconds

            case = f"{path}: tokens/s, {PROCESSES} processes ÷ 1, {streams} streams"
            rows.append(compare(case, lambda _: rate(several), lambda _: rate(one), pairs=pairs))
            for name, gateway in (("1 process", one), (f"{PROCESSES} processes", several)):
                row = spread(f"{path}: ms of CPU a token, {name}", costs[gateway.port][1:], pairs=pairs)
                rows.append(replace(row, target=0.05, at_most=True))
    return rows


def scale(work: Path, counts: Sequence[int], *, engines: int, clients: int, streams: int) -> None:
    """Print how many tokens per second pass with each number of processes: three rounds each, after one to warm up."""
    body: dict[str, object] = {"messages": [{"role": "user", "content": "What is machine learning?"}]}
    print(f"{len(os.sched_getaffinity(0))} cores, {engines} engines, {clients} clients, {streams} streams")
    print("processes\ttokens/s\tms of CPU a token")
    for count in counts:
        with gateways(work, [count], engines=engines, streams=streams) as (gateway,), Pool(clients) as pool:
            ask = partial(read_all, gateway.port, "/v1/chat/completions", body)
            found = []
            for _ in range(4):
                before, began = seconds_of(gateway), time.perf_counter()
                pool.map(ask, [streams // clients] * clients, chunksize=1)
                tokens = streams // clients * clients * NEW
                rate = tokens / (time.perf_counter() - began)
                found.append((rate, 1000 * (seconds_of(gateway) - before) / tokens))
        rate, cost = sorted(found[1:])[1]
        print(f"{count}\t{rate:.0f}\t{cost:.3f}", flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--scale", type=int, nargs="+", metavar="PROCESSES", help="only print tokens/s for each number")
    parser.add_argument("--engines", type=int, default=4, help="with --scale: processes that make the tokens")
    parser.add_argument("--clients", type=int, default=2, help="with --scale: processes that read them")
    arguments = parser.parse_args()
    if arguments.scale:
        sizes = {"engines": arguments.engines, "clients": arguments.clients, "streams": arguments.streams}
        scale(arguments.work, arguments.scale, **sizes)
        return
    rows = measure(arguments.work, arguments.pairs, arguments.streams)
    print(table(rows, measured="Several, tokens/s", base="One, tokens/s", value="Ratio or cost"))
    finish(arguments, "gateway", rows)


if __name__ == "__main__":
    main()

"""Thousands of malformed requests through the gateway to a real Triton: the server stays ready, and its memory flat.

`python -m tests.benchmarks.fuzz --requests 10000 --seed 1` starts a server, sends mutations of good requests over raw
sockets, and ends with code 1 when a process ended, an answer was no HTTP or the status 500, or the gateway's memory
grew.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import random
import socket
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support.echo_server import write_echo_repository
from tests.support.generated_bodies import BODIES, changed, damaged
from tests.support.servers import running_server
from trtserve.server.state import Server
from trtserve.server.triton.tritonserver import is_ready

# An unfinished request waits for the rest of it, up to the gateway's own time limit, which is longer.
_SECONDS = 0.5
_CONNECTED = 10.0  # this machine may be busy
_SETTLED = 4000
_GROWTH = 1.1


def main() -> int:
    """Send the requests, and report what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(write_echo_repository(Path(folder)), home=Path(folder), name="fuzz", gateway=True) as server,
    ):
        return _run(server, asked.requests, random.Random(asked.seed))


def _run(server: Server, count: int, chance: random.Random) -> int:
    (instance,) = server.instances
    assert instance.gateway is not None
    gateway = psutil.Process(instance.gateway.process.pid)
    answers: collections.Counter[str] = collections.Counter()
    settled = 0
    start = time.monotonic()
    for number in range(count):
        sent = _mutated(chance)
        answer = _exchange(server.address.http_port, sent)
        answers[answer] += 1
        if number == _SETTLED:
            settled = gateway.memory_info().rss
        wrong = answer == "not HTTP" or not all(process.alive() for process in (*server.roots, *instance.stubs))
        if wrong or answer == "500":
            sys.stderr.write(f"request {number}: {answer}\n{sent[:2000]!r}\n")
        if wrong:
            return 1
    grown = gateway.memory_info().rss / settled if settled else 1.0
    sys.stdout.write(f"{count} requests in {time.monotonic() - start:.0f} s: {dict(answers.most_common())}\n")
    sys.stdout.write(f"the gateway's memory after the first {_SETTLED}: × {grown:.2f}\n")
    return 0 if is_ready(server.address) and grown < _GROWTH and not answers["500"] else 1


def _exchange(port: int, sent: bytes) -> str:
    """Return the status of the answer, or what came instead."""
    with socket.create_connection(("127.0.0.1", port), timeout=_CONNECTED) as connection:
        connection.settimeout(_SECONDS)
        try:
            connection.sendall(sent)
            received = connection.recv(4096)
        except TimeoutError:
            return "no answer"
        except OSError:
            return "closed"
    if not received:
        return "closed"
    return received[9:12].decode() if received.startswith(b"HTTP/1.1 ") else "not HTTP"


def _mutated(chance: random.Random) -> bytes:
    path, body, headers = chance.choice(_SEEDS)(chance)
    method = "POST"
    if chance.random() < 0.1:
        method = chance.choice(("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "post", "", "A" * 100))
    if chance.random() < 0.1:
        path = chance.choice((path + "/", "/v2/../v2", "//", path * 50, "/v2/models/%00/infer", "/v2/logging", "*"))
    if chance.random() < 0.15:
        packed = chance.choice((gzip.compress, zlib.compress, bytes))(body)
        headers["Content-Encoding"], body = chance.choice(("gzip", "deflate", "br")), packed
    if chance.random() < 0.3:
        body = damaged(body, chance)
    headers.setdefault("Content-Length", str(len(body)))
    if chance.random() < 0.1:
        headers["Content-Length"] = chance.choice(("0", "-1", "1", str(10**12), "abc", str(len(body) + 5)))
    if chance.random() < 0.1:
        body = _chunked(body, chance)
        headers["Transfer-Encoding"] = chance.choice(("chunked", "Chunked", "gzip, chunked"))
        if chance.random() < 0.8:
            headers.pop("Content-Length")
    if chance.random() < 0.05:
        headers["X" * chance.randrange(1, 2000)] = "y" * chance.randrange(100_000)
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    sent = "\r\n".join([*lines, "", ""]).encode() + body
    return damaged(sent, chance) if chance.random() < 0.05 else sent


def _generate(chance: random.Random) -> tuple[str, bytes, dict[str, str]]:
    body: dict[str, Any] = {"text_input": "one two", "max_tokens": 2, "stream": False, "id": "1"}
    model, verb = chance.choice(("echo", "text_plain", "tensorrt_llm")), chance.choice(("generate", "generate_stream"))
    return f"/v2/models/{model}/{verb}", json.dumps(changed(body, chance)).encode(), _typed(chance)


def _infer(chance: random.Random) -> tuple[str, bytes, dict[str, str]]:
    shapes = {"input_ids": [1, 3], "input_lengths": [1, 1], "request_output_len": [1, 1]}
    data = {"input_ids": [5, 6, 7], "input_lengths": [3], "request_output_len": [2]}
    inputs = [{"name": name, "shape": shapes[name], "datatype": "INT32", "data": data[name]} for name in shapes]
    body = {"id": "2", "inputs": inputs, "outputs": [{"name": "output_ids", "parameters": {"binary_data": False}}]}
    return f"/v2/models/{_core(chance)}/infer", json.dumps(changed(body, chance)).encode(), _typed(chance)


def _binary(chance: random.Random) -> tuple[str, bytes, dict[str, str]]:
    sizes = {"input_ids": 3, "input_lengths": 1, "request_output_len": 1}
    inputs = [
        {"name": name, "shape": [1, size], "datatype": "INT32", "parameters": {"binary_data_size": 4 * size}}
        for name, size in sizes.items()
    ]
    head = json.dumps(changed({"inputs": inputs}, chance)).encode()
    length = chance.choice((len(head), len(head), len(head), 0, -1, 10**9, len(head) - 1))
    headers = {**_typed(chance), "Inference-Header-Content-Length": str(length)}
    return f"/v2/models/{_core(chance)}/infer", head + struct.pack("<5i", 5, 6, 7, 3, 2), headers


def _of_v1(chance: random.Random) -> tuple[str, bytes, dict[str, str]]:
    path = chance.choice(list(BODIES))
    return path, BODIES[path](chance.choice(("echo", "echo", "unknown")), chance), _typed(chance)


_SEEDS: tuple[Callable[[random.Random], tuple[str, bytes, dict[str, str]]], ...] = (
    _generate,
    _infer,
    _binary,
    _of_v1,
)


def _core(chance: random.Random) -> str:
    return chance.choice(("core_plain", "core_plain", "tensorrt_llm", "unknown"))


def _typed(chance: random.Random) -> dict[str, str]:
    kinds = ("application/json", "application/json", "application/x-www-form-urlencoded", "multipart/form-data", "")
    return {"Content-Type": chance.choice(kinds)}


def _chunked(body: bytes, chance: random.Random) -> bytes:
    size = chance.choice((1, 7, 4096))
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    end = chance.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"", b"zz\r\n"))
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + end


if __name__ == "__main__":
    sys.exit(main())

"""What the gateway adds to a request and to a streamed token: the same requests to it and to Triton, in pairs.

`python -m tests.benchmarks.gateway` prints medians of the differences. The model does no arithmetic.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.echo_server import write_echo_repository
from tests.support.servers import running_server
from trtserve.server.state import Server

_HEADERS = {"Content-Type": "application/json"}


def main() -> None:
    """Measure, and print one line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=500)
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(write_echo_repository(Path(folder)), home=Path(folder), name="echo", gateway=True) as server,
    ):
        gateway = server.instances[0].gateway
        assert gateway is not None
        ports = (server.address.triton_http[1], server.address.http_port)
        whole = [_request(port) for port in ports]
        streams = [_stream(port, asked.tokens) for port in ports]
        report = {
            "request, ms added": _added(whole, asked.pairs) * 1e3,
            "streamed token, ms added, 1 stream": _added(streams, max(10, asked.pairs // 10)) * 1e3 / asked.tokens,
            "streamed token, ms added, 8 streams": _eight(streams) * 1e3 / asked.tokens / 8,
            "resident memory, MiB": _memory(server) / 2**20,
        }
    for name, value in report.items():
        sys.stdout.write(f"{name}: {value:.3f}\n")


def _request(port: int) -> Callable[[], None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"text_input": "one", "max_tokens": 1})

    def send() -> None:
        connection.request("POST", "/v2/models/echo/generate", body, _HEADERS)
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()

    return send


def _stream(port: int, tokens: int) -> Callable[[], None]:
    body = json.dumps(
        {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": tokens, "streaming": True}
    ).encode()

    def send() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v2/models/tensorrt_llm/generate_stream", body, _HEADERS)
        assert connection.getresponse().read().count(b"data:") == tokens
        connection.close()

    return send


def _added(pair: list[Callable[[], None]], count: int) -> float:
    """Return the median difference of `count` pairs in seconds; which one goes first alternates."""
    for send in pair * 5:
        send()
    differences = []
    for number in range(count):
        seconds = {}
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            pair[which]()
            seconds[which] = time.perf_counter() - start
        differences.append(seconds[1] - seconds[0])
    return statistics.median(differences)


def _eight(pair: list[Callable[[], None]]) -> float:
    """Return the median difference in seconds between eight streams at once through the gateway and without it."""

    def together(send: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            threads = [threading.Thread(target=send) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return run

    return _added([together(send) for send in pair], 10)


def _memory(server: Server) -> float:
    import psutil

    gateway = server.instances[0].gateway
    assert gateway is not None
    return float(psutil.Process(gateway.process.pid).memory_info().rss)


if __name__ == "__main__":
    main()

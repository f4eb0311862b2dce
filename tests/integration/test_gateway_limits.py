"""The gateway's limits, with small ones, in front of a stand-in for Triton that answers as slowly as a test wants."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import certificates
from tests.support.gateways import HOST, RunningGateway, running_gateway
from tests.support.waiting import wait_until
from trtserve.gateway.settings import RequestLimits

LIMITS = RequestLimits(
    connections=20,
    requests=2,
    request_seconds=2.0,
    header_seconds=0.5,
    body_seconds=0.5,
    stalled_seconds=0.5,
    body_bytes=1 << 20,
    json_bytes=1 << 20,
    buffered_bytes=1 << 19,
    chunks=50,
)
CONFIG = {
    "name": "m",
    "max_batch_size": 0,
    "model_transaction_policy": {"decoupled": True},
    "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}],
}
STOP = {"name": "stop", "data_type": "TYPE_BOOL", "dims": [1]}
CONFIGS: dict[str, dict[str, Any]] = {
    "m": CONFIG,
    "core": {**CONFIG, "name": "core", "input": [STOP]},
    "ensemble": {**CONFIG, "name": "ensemble", "ensemble_scheduling": {"step": [{"model_name": "core"}]}},
}
GENERATE = "/v2/models/m/generate_stream"
COMPLETIONS = b"/v1/completions"


class Triton(ThreadingHTTPServer):
    """Answers `hang` when it is released, `flood` without an end, and everything else at once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self.forget()

    def handle_error(self, *_: object) -> None:
        """Say nothing of connections that the gateway has ended."""

    def forget(self) -> None:
        """Begin anew for another test."""
        self.release = threading.Event()
        self.left = threading.Event()
        self.bodies: list[bytes] = []
        self.encodings: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    server: Triton

    def do_GET(self) -> None:
        self._answer(CONFIGS[self.path.split("/")[3]] if self.path.endswith("/config") else {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(body)
        self.server.encodings.append(self.headers["Accept-Encoding"])
        text = json.loads(body).get("text_input")
        if text == "hang":
            self.server.release.wait(30)
        if text == "flood":
            self._flood()
        else:
            self._answer({"text_output": text})

    def _flood(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            while not self.server.release.is_set():
                self.wfile.write(b"data: {}\n\n" * 1000)
        except OSError:
            self.server.left.set()

    def _answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def behind() -> Iterator[Triton]:
    with Triton() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.release.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def triton(behind: Triton) -> Iterator[Triton]:
    behind.forget()
    yield behind
    behind.release.set()


@pytest.fixture(scope="module")
def gateway(behind: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with running_gateway(folder, int(behind.server_address[1]), model="m", limits=LIMITS) as gateway:
        yield gateway


def begin(connection: http.client.HTTPConnection, text: str) -> None:
    connection.request("POST", GENERATE, json.dumps({"text_input": text}), {"Content-Type": "application/json"})


def raw(gateway: RunningGateway, sent: bytes) -> bytes:
    """Send bytes, and return what comes until the gateway hangs up."""
    with socket.create_connection((HOST, gateway.port), timeout=30) as connection:
        connection.sendall(sent)
        received = b""
        with suppress(ConnectionResetError):  # it hung up before it had read everything
            while part := connection.recv(4096):
                received += part
        return received


def test_an_answer_with_the_gateways_own_id_is_not_compressed(gateway: RunningGateway, triton: Triton) -> None:
    """The id is taken out of the answer again."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}
    for own in ({}, {"id": "mine"}):
        with gateway.connected() as connection:
            connection.request("POST", GENERATE, json.dumps({"text_input": "x", **own}), headers)
            assert connection.getresponse().status == 200
    assert triton.encodings == [None, "gzip"]


def test_slow_headers_and_bodies_are_cut_off(gateway: RunningGateway) -> None:
    assert raw(gateway, b"") == b""
    assert raw(gateway, b"POST /v2 HTTP/1.1\r\nHost: localhost\r\n") == b""
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n".encode()
    assert raw(gateway, head + b"{").startswith(b"HTTP/1.1 408 ")
    assert raw(gateway, head.replace(GENERATE.encode(), COMPLETIONS) + b"{").startswith(b"HTTP/1.1 408 ")


def test_large_headers_and_many_chunks_are_refused(gateway: RunningGateway) -> None:
    head = b"GET /v2/health/live HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\nX: "
    assert b" 200 " in raw(gateway, head + b"y" * 60_000 + b"\r\n\r\n")
    assert b" 200 " not in raw(gateway, head + b"y" * 66_000 + b"\r\n\r\n")
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert raw(gateway, head + b"1\r\nx\r\n" * 60).startswith(b"HTTP/1.1 400 ")
    assert b" 200 " not in raw(gateway, head + b"2\r\n{}\r\n0\r\nX: y\r\n\r\n")


def test_large_bodies_are_refused_before_they_arrive(gateway: RunningGateway) -> None:
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10**12}\r\n\r\n".encode()
    assert raw(gateway, head).startswith(b"HTTP/1.1 413 ")
    assert raw(gateway, head.replace(GENERATE.encode(), COMPLETIONS)).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS.decode()])
def test_bodies_have_a_limit_on_their_memory_together(gateway: RunningGateway, path: str) -> None:
    with gateway.connected() as connection:
        connection.request("POST", path, b" " * (LIMITS.buffered_bytes + 1), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 503
        assert b"too many large requests" in answer.read()


def test_too_many_requests_get_503_and_a_hint(gateway: RunningGateway, triton: Triton) -> None:
    with ExitStack() as stack:
        busy = [stack.enter_context(gateway.connected()) for _ in range(LIMITS.requests)]
        for connection in busy:
            begin(connection, "hang")
        wait_until(lambda: len(triton.bodies) == LIMITS.requests)
        with gateway.connected() as late:
            begin(late, "hello")
            answer = late.getresponse()
            assert answer.status == 503
            assert answer.headers["Retry-After"]
        assert gateway.status("/v2/health/live") == 200
        triton.release.set()
        assert [connection.getresponse().status for connection in busy] == [200, 200]


def idle(gateway: RunningGateway, stack: ExitStack, **headers: str) -> http.client.HTTPConnection:
    """A connection that has had an answer."""
    connection = stack.enter_context(gateway.connected())
    connection.request("GET", "/v2/health/live", headers=headers)
    connection.getresponse().read()
    return connection


def test_idle_connections_give_way_to_new_ones(gateway: RunningGateway, triton: Triton) -> None:
    with ExitStack() as stack:
        busy = stack.enter_context(gateway.connected())
        begin(busy, "hang")
        first = idle(gateway, stack)
        for _ in range(LIMITS.connections + 5):
            idle(gateway, stack)
        assert gateway.status("/v2/health/live") == 200
        assert first.sock.recv(1) == b""
        triton.release.set()
        assert busy.getresponse().status == 200


def test_strangers_take_nothing_from_clients_with_the_key(triton: Triton, tmp_path: Path) -> None:
    """Connections that are idle or unfinished, and bodies for the pages that need no key."""
    key = tmp_path / "key"
    key.write_text("a-key-of-this-test")
    key.chmod(0o600)
    authorization = {"Authorization": "Bearer a-key-of-this-test"}
    with (
        running_gateway(tmp_path, triton.server_port, model="m", limits=LIMITS, key_file=key) as gateway,
        ExitStack() as stack,
    ):
        known = stack.enter_context(gateway.connected())
        known.request("GET", "/")  # without the page, a sentence for who looks with a browser
        answer = known.getresponse()
        assert (answer.status, b"trtserve start --ui" in answer.read()) == (200, True)
        known.request("GET", "/v2/models/m/config", headers=authorization)
        assert known.getresponse().read()
        for path in ("/", "/health", "/v2/health/live", GENERATE):
            for _ in range(LIMITS.connections // 2):
                stranger = stack.enter_context(socket.create_connection((HOST, gateway.port)))
                head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 400000\r\n\r\n"
                stranger.sendall(head.encode() + b"x" * 1000)
        for _ in range(3):
            known.request("GET", "/v2/models/m/config", headers=authorization)
            answer = known.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
        assert gateway.status("/v2/health/live") == 200


def test_connections_that_do_not_finish_their_handshake_make_room(triton: Triton, tmp_path: Path) -> None:
    made, begun = certificates(), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    tls: dict[str, Any] = {"root": made.root, "certificate": made.server, "private_key": made.server_key}
    patient = replace(LIMITS, header_seconds=600.0)
    with (
        running_gateway(tmp_path, triton.server_port, model="m", limits=patient, **tls) as gateway,
        ExitStack() as stack,
    ):
        strangers = []
        for _ in range(2 * LIMITS.connections):
            strangers.append(stack.enter_context(socket.create_connection((HOST, gateway.port), timeout=60)))
            strangers[-1].sendall(begun)
        assert strangers[0].recv(1) == b""
        assert gateway.status("/v2/health/live") == 200


def test_connections_wait_while_no_file_descriptor_is_left(gateway: RunningGateway) -> None:
    soft, hard = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)
    with gateway.connected() as connection:
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (3, hard))
        try:
            connection.request("GET", "/v2/health/live")
            wait_until(lambda: "connections wait" in gateway.log.read_text())
        finally:
            resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert connection.getresponse().status == 200


def test_a_request_that_takes_too_long_is_ended(gateway: RunningGateway, triton: Triton) -> None:
    assert not triton.bodies
    with gateway.connected() as connection:
        begin(connection, "hang")
        answer = connection.getresponse()
        assert answer.status == 504
        assert "longer than 2 s" in json.loads(answer.read())["error"]


def are_over(count: Callable[[], int]) -> bool:
    """Return whether nothing is counted for three times as long as the gateway takes to repeat a stop."""
    before = count()
    time.sleep(1.5)
    return count() == before


def test_a_stop_is_repeated_but_not_while_another_client_waits_for_the_same_id(triton: Triton, tmp_path: Path) -> None:
    path, body = "/v2/models/ensemble/generate_stream", json.dumps({"id": "same", "text_input": "hang"})

    def stops() -> int:
        return sum(b'"stop"' in each for each in triton.bodies)

    with running_gateway(tmp_path, int(triton.server_address[1]), model="ensemble", core_models=("core",)) as gateway:
        with gateway.connected() as first:
            first.request("POST", path, body, {"Content-Type": "application/json"})
            wait_until(lambda: triton.bodies)
        wait_until(lambda: stops() >= 2)
        with gateway.connected() as second:
            second.request("POST", path, body, {"Content-Type": "application/json"})
            wait_until(lambda: len(triton.bodies) - stops() == 2)
            wait_until(lambda: are_over(stops))
            triton.release.set()
            assert second.getresponse().status == 200


def test_a_client_that_does_not_read_is_cut_off(gateway: RunningGateway, triton: Triton) -> None:
    with gateway.connected() as connection:
        begin(connection, "flood")
        assert triton.left.wait(60)


def test_the_first_signal_drains_and_the_second_ends(gateway: RunningGateway, triton: Triton) -> None:
    with gateway.connected() as connection:
        begin(connection, "hang")
        wait_until(lambda: triton.bodies)
        os.kill(gateway.process.pid, signal.SIGTERM)
        wait_until(lambda: gateway.status("/v2/health/ready") == 503)
        with gateway.connected() as late:
            begin(late, "hello")
            assert late.getresponse().status == 503
        os.kill(gateway.process.pid, signal.SIGTERM)
        wait_until(lambda: not gateway.process.alive())

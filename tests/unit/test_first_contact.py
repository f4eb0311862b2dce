"""Ports that do not answer, or speak another protocol: calls end within a time limit and say what to do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from trtserve.bench.plan import plan_benchmark
from trtserve.cli import run
from trtserve.client.endpoint import Endpoint, spoken_at
from trtserve.client.grpc_transport import grpc_client
from trtserve.client.http_transport import http_client
from trtserve.client.transport import SyncClient
from trtserve.errors import ServerUnreachableError
from trtserve.specs import BenchSpec

GRPC_SETTINGS = b"\x00\x00\x18\x04\x00\x00\x00\x00\x00\x00\x04\x00@"
HTTP_ANSWER = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"


@contextmanager
def port_that_says(answer: bytes) -> Iterator[int]:
    """A port on which every connection receives `answer`; with an empty answer connections stay open."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        ended, held = threading.Event(), []

        def serve() -> None:
            while not ended.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                held.append(connection)
                if answer:
                    connection.settimeout(5)
                    with suppress(OSError):  # the client has seen enough and is gone
                        connection.recv(1 << 16)
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join(10)
            for connection in held:
                connection.close()


def client_of(protocol: str, port: int, *, connect_timeout: float = 10.0) -> SyncClient:
    endpoint = Endpoint(http_port=port, grpc_port=port, connect_timeout=connect_timeout)
    return http_client(endpoint, timeout=60) if protocol == "http" else grpc_client(endpoint, timeout=60)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_silent_port_is_an_unreachable_server(protocol: str) -> None:
    with (
        port_that_says(b"") as port,
        closing(client_of(protocol, port, connect_timeout=0.2)) as client,
        pytest.raises(ServerUnreachableError, match=r"answers at .*: no answer within 0.2 s") as caught,
    ):
        client.describe("ensemble")
    assert caught.value.hint == "--timeout or --connect-timeout allows no more; raise it."


def test_benchmark_of_a_silent_port_can_only_be_planned_offline() -> None:
    with port_that_says(b"") as port:
        endpoint = Endpoint(grpc_port=port, connect_timeout=0.2)
        with pytest.raises(ServerUnreachableError, match="no answer within"):
            plan_benchmark(BenchSpec(vocab_size=100), endpoint)
        assert plan_benchmark(BenchSpec(vocab_size=100), endpoint, offline=True).concurrency == 8


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_query_of_a_silent_port_ends_with_its_exit_code(protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    with port_that_says(b"") as port:
        asked = ["--url", f"127.0.0.1:{port}", "--protocol", protocol, "--connect-timeout", "0.2"]
        assert run(["query", "hello", *asked]) == 40
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_connect_timeout_must_be_positive(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["query", "hello", "--url", "127.0.0.1:9", "--connect-timeout", seconds]) == 2
    assert "--connect-timeout is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "spoken"), [(GRPC_SETTINGS, "gRPC"), (HTTP_ANSWER, "HTTP"), (TLS_ALERT, "TLS"), (b"220 mail\r\n", None)]
)
def test_protocol_is_recognised_from_the_first_bytes(answer: bytes, spoken: str | None) -> None:
    with port_that_says(answer) as port:
        assert spoken_at(f"127.0.0.1:{port}") == spoken


@pytest.mark.parametrize(
    ("protocol", "answer", "message", "advice"),
    [
        ("http", GRPC_SETTINGS, "is a gRPC port, but was called over HTTP", "--protocol grpc"),
        ("grpc", HTTP_ANSWER, "is an HTTP port, but was called over gRPC", "--protocol http"),
        ("http", TLS_ALERT, "is an encrypted port", "--ssl"),
        ("grpc", TLS_ALERT, "is an encrypted port", "--ssl"),
        ("http", b"220 mail\r\n", "does not speak HTTP", "trtserve status"),
    ],
)
def test_port_of_another_protocol_is_named(protocol: str, answer: bytes, message: str, advice: str) -> None:
    with (
        port_that_says(answer) as port,
        closing(client_of(protocol, port)) as client,
        pytest.raises(ServerUnreachableError, match=message) as caught,
    ):
        client.model_names()
    assert advice in str(caught.value.hint)


@pytest.mark.parametrize(("answer", "found"), [(GRPC_SETTINGS, "is a gRPC port"), (HTTP_ANSWER, "no page /metrics")])
def test_wrong_metrics_port_is_named(answer: bytes, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    with port_that_says(answer) as port:
        assert run(["metrics", "--url", f"127.0.0.1:{port}"]) == 40
    assert found in " ".join(capsys.readouterr().err.split())

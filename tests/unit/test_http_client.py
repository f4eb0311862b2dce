"""Streams over HTTP: whole answers, and answers whose connection is lost on the way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from trtserve.errors import RequestError, ServerUnreachableError
from trtserve.triton.client import Endpoint, ModelDescription
from trtserve.triton.http_client import HttpClient
from trtserve.triton.tensors import TensorDescription

HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = (b'data: {"text_output":" M"}\n\n', b'data: {"text_output":"ach"}\n\n')
TEXT = TensorDescription(name="text_output", datatype="BYTES", dims=(-1,))
MODEL = ModelDescription(name="m", decoupled=True, max_batch_size=1, inputs={}, outputs={"text_output": TEXT})


def chunks(*contents: bytes) -> bytes:
    return b"".join(f"{len(content):x}\r\n".encode() + content + b"\r\n" for content in contents)


@pytest.fixture
def serving() -> Iterator[Callable[[bytes], HttpClient]]:
    """A client of a server that answers its one request with the given bytes and ends there."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def start(answer: bytes) -> HttpClient:
        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                # Closing with unread bytes would reset the connection instead of ending it.
                while connection.recv(1 << 16):
                    pass

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return HttpClient(Endpoint(http_port=listener.getsockname()[1]), timeout=10)

    with listener:
        yield start
        for thread in threads:
            thread.join(10)


def texts(client: HttpClient) -> Iterator[str]:
    for reply in client.infer(MODEL, [], request_id="r", stream=True):
        yield from reply.outputs["text_output"]


@pytest.mark.parametrize("sent", [EVENTS, (b"".join(EVENTS),), (EVENTS[0][:9], EVENTS[0][9:] + EVENTS[1])])
def test_events_do_not_depend_on_the_chunks(serving: Callable[[bytes], HttpClient], sent: tuple[bytes, ...]) -> None:
    assert list(texts(serving(HEADER + chunks(*sent) + b"0\r\n\r\n"))) == [" M", "ach"]


@pytest.mark.parametrize("end", [b"", b"2", b"1f\r\ndata: {"])
def test_lost_connection_is_no_end(serving: Callable[[bytes], HttpClient], end: bytes) -> None:
    answer = texts(serving(HEADER + chunks(EVENTS[0]) + end))
    assert next(answer) == " M"
    with pytest.raises(ServerUnreachableError, match="in the middle of the answer"):
        next(answer)


def test_time_limit_holds_for_the_whole_stream(
    serving: Callable[[bytes], HttpClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 9.0, 9.5, 10.5])
    monkeypatch.setattr("trtserve.triton.http_client.time.monotonic", lambda: next(clock))
    answer = texts(serving(HEADER + chunks(*EVENTS) + b"0\r\n\r\n"))
    assert next(answer) == " M"
    with pytest.raises(RequestError, match=r"No answer from .* within 10 s"):
        next(answer)

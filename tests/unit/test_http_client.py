"""The HTTP client: streams, lost connections, shapes, TLS."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.certificates import certificates
from trtserve.client import http_transport
from trtserve.client.endpoint import Endpoint, RequestCancelledError, Tls
from trtserve.client.http_transport import generate_body, http_client, infer_body
from trtserve.client.tensors import ModelDescription, ModelRequest, Reply, Tensor, TensorDescription, generate_shape
from trtserve.client.transport import TransportClient
from trtserve.errors import RequestError, ServerUnreachableError, UsageError

HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = (b'data: {"text_output":" M"}\n\n', b'data: {"text_output":"ach"}\n\n')
TEXT = TensorDescription(name="text_output", datatype="BYTES", dims=(-1,))
MODEL = ModelDescription(name="m", decoupled=True, max_batch_size=1, inputs={}, outputs={"text_output": TEXT})


def chunks(*contents: bytes) -> bytes:
    return b"".join(f"{len(content):x}\r\n".encode() + content + b"\r\n" for content in contents)


@pytest.fixture
def serving() -> Iterator[Callable[..., TransportClient]]:
    """A client of a server that answers its one request with the given bytes and ends there."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    clients: list[TransportClient] = []

    def start(answer: bytes, timeout: float = 10) -> TransportClient:
        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                # Closing with unread bytes would reset the connection instead of ending it.
                while connection.recv(1 << 16):
                    pass

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        clients.append(http_client(Endpoint(http_port=listener.getsockname()[1]), timeout=timeout))
        return clients[-1]

    with listener:
        yield start
        for client in clients:
            client.close()
        for thread in threads:
            thread.join(10)


def texts(client: TransportClient) -> Iterator[str]:
    for reply in client.infer(ModelRequest(model=MODEL, tensors=[], id="r", stream=True)):
        yield from reply.outputs["text_output"]


def test_invalid_utf8_is_an_answer_too(serving: Callable[..., TransportClient]) -> None:
    event = b'data: {"text_output":"a\xe2\x82"}\n\n'
    assert list(texts(serving(HEADER + chunks(event) + b"0\r\n\r\n"))) == ["a\ufffd"]


def test_any_model_name_can_be_requested() -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            """Stay silent."""

    with QuietServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with (
                closing(http_client(Endpoint(http_port=server.server_port), timeout=10)) as client,
                pytest.raises(RequestError, match="größe 1/2"),
            ):
                client.describe("größe 1/2")
        finally:
            server.shutdown()
            thread.join(10)
    assert asked == ["/v2/models/gr%C3%B6%C3%9Fe%201%2F2/config"]


@pytest.mark.parametrize("sent", [EVENTS, (b"".join(EVENTS),), (EVENTS[0][:9], EVENTS[0][9:] + EVENTS[1])])
def test_events_do_not_depend_on_the_chunks(serving: Callable[..., TransportClient], sent: tuple[bytes, ...]) -> None:
    assert list(texts(serving(HEADER + chunks(*sent) + b"0\r\n\r\n"))) == [" M", "ach"]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 2000,
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 9000,
        HEADER + chunks(b'data: {"text_output":"' + b"a" * 9000),
        HEADER.replace(b"200", b"500") + chunks(b"a" * 9000),
    ],
    ids=["headers", "a header", "an event", "an error"],
)
def test_an_answer_without_an_end_is_given_up(
    serving: Callable[..., TransportClient], monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    for limit in ("_MOST_HEAD", "_MOST_EVENT"):
        monkeypatch.setattr(http_transport, limit, 8192)
    monkeypatch.setattr(http_transport.HttpPool.send, "__kwdefaults__", {"timeout": None, "most": 8192})
    with pytest.raises(ServerUnreachableError, match="more bytes than any that is expected"):
        list(serving(answer, 60).infer(ModelRequest(model=MODEL, tensors=[], id="", stream=True)))


def test_an_error_is_one_whatever_the_status(serving: Callable[..., TransportClient]) -> None:
    answer = texts(serving(HEADER + chunks(EVENTS[0], b'data: {"error":"the model has ended"}\n\n') + b"0\r\n\r\n"))
    assert next(answer) == " M"
    with pytest.raises(RequestError, match="the model has ended"):
        next(answer)


@pytest.mark.parametrize("end", [b"", b"2", b"1f\r\ndata: {"])
def test_lost_connection_is_not_the_end(serving: Callable[..., TransportClient], end: bytes) -> None:
    answer = texts(serving(HEADER + chunks(EVENTS[0]) + end))
    assert next(answer) == " M"
    with pytest.raises(ServerUnreachableError, match="in the middle of the answer"):
        next(answer)


def test_time_limit_covers_the_stream() -> None:
    stop = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(HEADER)
            for _ in range(600):
                if stop.wait(0.1):
                    break
                connection.sendall(chunks(EVENTS[0]))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with (
            closing(http_client(Endpoint(http_port=listener.getsockname()[1]), timeout=0.7)) as client,
            pytest.raises(RequestError, match=r"No answer from .* within 0.7 s"),
        ):
            list(texts(client))
        stop.set()
        thread.join(10)


def test_cancelled_stream_is_not_a_lost_connection(serving: Callable[..., TransportClient]) -> None:
    client = serving(HEADER + chunks(EVENTS[0]))
    answer = texts(client)
    assert next(answer) == " M"
    client.cancel()
    with pytest.raises(RequestCancelledError):
        next(answer)


def test_cancellation_before_the_request_holds() -> None:
    with closing(http_client(Endpoint(http_port=1), timeout=10)) as client:
        client.cancel()
        with pytest.raises(RequestCancelledError):
            next(texts(client))


def test_cancellation_while_the_request_is_prepared_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer() -> AsyncGenerator[Reply, None]:
        yield Reply(outputs={"text_output": np.array(["too late"], object)})

    def cancelled_meanwhile(*_: Any, **__: Any) -> AsyncGenerator[Reply, None]:
        client.cancel()
        return answer()

    with closing(http_client(Endpoint(http_port=1), timeout=10)) as client:
        monkeypatch.setattr(client._transport, "infer", cancelled_meanwhile)
        with pytest.raises(RequestCancelledError):
            next(texts(client))


@pytest.mark.parametrize(
    ("dims", "count", "shape"),
    [
        ((-1, 1), 1, (1, 1)),
        ((-1, 1), 3, (3, 1)),
        ((-1, -1), 3, (1, 3)),
        ((-1, -1, 3), 6, (1, 2, 3)),
        ((-1, 2, -1), 6, (1, 2, 3)),
        ((-1, -1, -1), 6, (1, 1, 6)),
        ((2,), 2, (2,)),
    ],
)
def test_shapes_that_generate_gives(dims: Sequence[int], count: int, shape: tuple[int, ...]) -> None:
    assert generate_shape(dims, count) == shape


def plain_model(**dims: tuple[int, ...]) -> ModelDescription:
    inputs = {name: TensorDescription(name=name, datatype="FP32", dims=size) for name, size in dims.items()}
    return ModelDescription(
        name="m", decoupled=False, max_batch_size=4, inputs=inputs, outputs={"text_output": TEXT, "x": inputs["x"]}
    )


def test_generate_cannot_carry_several_variable_axes() -> None:
    model = plain_model(x=(-1, -1))
    flat = model.tensor("x", np.zeros((1, 3), np.float32))
    assert generate_body([flat], request_id="r", model=model) == {"x": [0.0, 0.0, 0.0], "id": "r"}
    for tensor in (
        model.tensor("x", np.zeros((2, 3), np.float32)),
        Tensor(name="x", datatype="FP32", shape=(2, 1, 1), values=[1, 2]),
    ):
        with pytest.raises(UsageError, match="cannot be sent over HTTP") as caught:
            generate_body([tensor], request_id="r", model=model)
        assert "--protocol grpc" in str(caught.value.hint)


def test_infer_carries_any_shape_in_binary() -> None:
    model = plain_model(x=(-1, -1))
    body, length = infer_body([model.tensor("x", np.ones((2, 3), np.float32))], request_id="r", outputs=("y",))
    head = json.loads(body[:length])
    assert head["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [1, 2, 3], "parameters": {"binary_data_size": 24}}
    ]
    assert (head["id"], head["outputs"][0]["name"]) == ("r", "y")
    assert body[length:] == np.ones(6, np.float32).tobytes()


class InferHandler(BaseHTTPRequestHandler):
    """Answers every infer request with a text, an array and a parameter, as Triton does."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        contents = [b"\x02\0\0\0hi", np.arange(6, dtype=np.float32).tobytes()]
        outputs: list[dict[str, Any]] = [
            {"name": "text_output", "datatype": "BYTES", "shape": [1]},
            {"name": "x", "datatype": "FP32", "shape": [1, 2, 3]},
        ]
        for output, content in zip(outputs, contents, strict=True):
            output["parameters"] = {"binary_data_size": len(content)}
        head = json.dumps({"outputs": outputs, "parameters": {"finish_reason": "length"}}).encode()
        self.send_response(200)
        self.send_header("Inference-Header-Content-Length", str(len(head)))
        self.send_header("Content-Length", str(len(head) + sum(map(len, contents))))
        self.end_headers()
        self.wfile.write(b"".join([head, *contents]))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Stay silent."""


class QuietServer(HTTPServer):
    """A refused handshake is what some tests want."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Stay silent."""


@contextmanager
def infer_server(context: ssl.SSLContext | None = None) -> Iterator[int]:
    with QuietServer(("127.0.0.1", 0), InferHandler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(10)


def test_answer_of_infer_has_shapes() -> None:
    with infer_server() as port, closing(http_client(Endpoint(http_port=port), timeout=10)) as client:
        (reply,) = client.infer(ModelRequest(model=plain_model(x=(-1, -1)), tensors=[], id="r"))
    assert reply.outputs["text_output"].tolist() == ["hi"]
    assert reply.outputs["x"].tolist() == [[[0, 1, 2], [3, 4, 5]]]
    assert reply.parameters == {"finish_reason": "length"}


@pytest.fixture
def https() -> Iterator[int]:
    """A server that wants a client's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates().server, certificates().server_key)
    context.load_verify_locations(certificates().root)
    context.verify_mode = ssl.CERT_REQUIRED
    # With TLS 1.3 a client learns only while reading that its certificate was missed.
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with infer_server(context) as port:
        yield port


def ask(port: int, tls: Tls | None) -> str:
    with closing(http_client(Endpoint(http_port=port, tls=tls), timeout=10)) as client:
        (reply,) = client.infer(ModelRequest(model=plain_model(x=(-1, -1)), tensors=[], id="r"))
    return str(reply.outputs["text_output"][0])


def own() -> dict[str, Any]:
    """What a client shows of itself."""
    return {"private_key": certificates().client_key, "certificate_chain": certificates().client}


def test_https_with_certificates_of_both_sides(https: int) -> None:
    assert ask(https, Tls(root_certificates=certificates().root, **own())) == "hi"


def test_https_to_a_host_whose_own_certificate_is_the_root(https: int, tmp_path: Path) -> None:
    """As where a server's certificate is pinned: the host has another name, and no authority is known."""
    leaf = certificates().server.read_text().partition("-----END CERTIFICATE-----")
    (tmp_path / "leaf.pem").write_text("".join(leaf[:2]) + "\n")
    assert ask(https, Tls(root_certificates=tmp_path / "leaf.pem", server_name="elsewhere", **own())) == "hi"


def test_https_without_trust_or_without_an_own_certificate(https: int) -> None:
    with pytest.raises(ServerUnreachableError, match="certificate") as caught:
        ask(https, Tls(**own()))
    assert "--root-certificates" in str(caught.value.hint)
    with pytest.raises(ServerUnreachableError):
        ask(https, Tls(root_certificates=certificates().root))
    with pytest.raises(ServerUnreachableError):
        ask(https, None)


def test_https_to_a_plain_port_has_a_hint() -> None:
    with infer_server() as port, pytest.raises(ServerUnreachableError) as caught:
        ask(port, Tls(root_certificates=certificates().root))
    assert "without --ssl" in str(caught.value.hint)


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for path in (tmp_path / "empty.pem", tmp_path / "nowhere.pem"):
        with pytest.raises(UsageError, match="cannot be used") as caught:
            ask(1, Tls(root_certificates=path))
        assert "_ssl" not in caught.value.message
    empty = tmp_path / "empty.pem"
    with pytest.raises(UsageError, match="one of them is not a PEM file"):
        ask(1, Tls(private_key=empty, certificate_chain=empty))
    with pytest.raises(UsageError, match="must be given together"):
        Tls(private_key=path)

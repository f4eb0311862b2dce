"""The gateway in front of a real Triton: its protocol passes unnoticed, what would crash Triton does not."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import http as tritonclient
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tests.benchmarks.memory import process_bytes
from tests.support.echo_server import write_echo_repository
from tests.support.servers import running_server
from tests.support.waiting import eventually, wait_until
from trtserve.client.endpoint import SECRET_NAME
from trtserve.process import ProcessId, arguments
from trtserve.programs.shared.run_folder import VARIABLE, Heartbeat
from trtserve.server.state import Server, run_folder
from trtserve.store import Store

pytestmark = pytest.mark.triton

JSON = {"Content-Type": "application/json"}
FOREVER = {"text_input": "forever", "max_tokens": 1, "stream": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    with running_server(write_echo_repository(root), home=root / "home", name="echo", gateway=True) as server:
        yield server


@contextmanager
def connected(server: Server, *, inner: bool = False) -> Iterator[http.client.HTTPConnection]:
    """A connection to the gateway, or to Triton's own HTTP service."""
    port = server.address.triton_http[1] if inner else server.address.http_port
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        yield connection


def ask(
    server: Server,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] = JSON,
    *,
    inner: bool = False,
    chunked: bool = False,
) -> tuple[int, bytes]:
    content = json.dumps(body).encode() if isinstance(body, dict | list) else body
    if inner:
        headers = {SECRET_NAME: str(server.address.inner_secret), **headers}
    with connected(server, inner=inner) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before the whole body was sent
            connection.request(method, path, content, dict(headers), encode_chunked=chunked)
        response = connection.getresponse()
        return response.status, response.read()


def infer(*shape: int, data: Any = (1,)) -> dict[str, Any]:
    return {"inputs": [{"name": "input_ids", "shape": shape, "datatype": "INT32", "data": data}]}


FORM = {"Content-Type": "application/x-www-form-urlencoded"}
CHUNKED = {**JSON, "Transfer-Encoding": "chunked"}
DEFLATED = {**JSON, "Content-Encoding": "deflate"}
# Each of these ended Triton 2.51, or took gigabytes of its memory.
CRASHES: dict[str, tuple[str, Mapping[str, str], Callable[[], Any]]] = {
    "5 MB form": ("echo/generate", FORM, lambda: b"a=" + b"%41" * 1_700_000),
    "600,000 chunks": ("echo/generate", CHUNKED, lambda: (b"x" for _ in range(600_000))),
    "shape beyond 64 bits": ("tensorrt_llm/infer", JSON, lambda: infer(9223372036854775807, 2)),
    "shape of 2^62": ("tensorrt_llm/infer", JSON, lambda: infer(4611686018427387904)),
    "shape of 10^11": ("tensorrt_llm/infer", JSON, lambda: infer(100000000000)),
    "nested data": ("tensorrt_llm/infer", JSON, lambda: json.dumps(infer(1)).encode().replace(b"[1]}", b"[" * 50_000)),
    "deflate bomb": ("tensorrt_llm/infer", DEFLATED, lambda: zlib.compress(bytes(80_000_000), 1)),
}


@pytest.mark.parametrize("name", CRASHES)
def test_a_request_that_crashes_triton_is_refused_and_the_server_lives(server: Server, name: str) -> None:
    path, headers, body = CRASHES[name]
    status, _ = ask(server, "POST", f"/v2/models/{path}", body(), headers, chunked=headers is CHUNKED)
    assert 400 <= status < 500
    assert server.instances[0].process.alive()
    assert ask(server, "GET", "/v2/health/ready")[0] == 200


@pytest.mark.parametrize("unknown", ["nobody", "echo/versions/7"])
def test_whoever_asks_whether_an_unknown_model_is_ready_is_told(server: Server, unknown: str) -> None:
    status, text = ask(server, "GET", f"/v2/models/{unknown}/ready")
    assert status == 404
    assert "is not found" in str(text)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v2/systemsharedmemory/region/r/register", 403),
        ("POST", "/v2/logging", 403),
        ("GET", "/v2/trace/setting", 403),
        ("POST", "/v2/repository/models/echo/unload", 403),
        ("GET", "/v2/models/echo/generate", 405),
        ("GET", "/v2/anything", 404),
        ("GET", "/v2/models/unknown/config", 404),
        ("POST", "/v2/models/unknown/generate", 404),
    ],
)
def test_paths_that_no_client_of_a_model_needs_are_closed(server: Server, method: str, path: str, status: int) -> None:
    found, text = ask(server, method, path, {} if method == "POST" else None)
    assert found == status, text
    assert json.loads(text)["error"]


def test_triton_itself_closes_them_too(server: Server) -> None:
    """No header opens them: a name has no colon."""
    for headers in (JSON, {**JSON, "trtserve": "closed: always"}):
        for path in ("/v2/logging", "/v2/trace/setting"):
            assert ask(server, "GET", path, headers=headers, inner=True)[0] == 403


def test_clients_cannot_fill_the_log(server: Server) -> None:
    gateway = server.instances[0].gateway
    assert gateway is not None
    before = gateway.log.read_text().splitlines()
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "a" * 24,
    }
    for number in range(20):
        assert ask(server, "GET", f"/v1/realtime{number}", headers=upgrade)[0] == 404
        with socket.create_connection(("127.0.0.1", server.address.http_port)) as connection:
            connection.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert b" 400 " in connection.recv(100)
    assert len(gateway.log.read_text().splitlines()) <= len(before) + 1


def test_triton_itself_answers_only_its_gateway(server: Server) -> None:
    asked = [
        ("GET", "/v2/health/ready"),
        ("GET", "/v2/models/echo/ready"),
        ("GET", "/v2"),
        ("GET", "/v2/models/echo/config"),
        ("GET", "/v2/models/stats"),
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/models/echo/generate"),
        ("POST", "/v2/models/echo/infer"),
    ]
    for headers in (JSON, {**JSON, SECRET_NAME: "0" * 32}):
        for method, path in asked:
            with closing(http.client.HTTPConnection(*server.address.triton_http, timeout=30)) as connection:
                connection.request(method, path, b"{}" if method == "POST" else None, headers)
                assert connection.getresponse().status == 403, path


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v2"),
        ("GET", "/v2/models/echo"),
        ("GET", "/v2/models/echo/config"),
        ("GET", "/v2/models/echo/versions/1/config"),
        ("GET", "/v2/models/echo/ready"),
        ("POST", "/v2/repository/index"),
        ("GET", "/v2/health/live"),
    ],
)
def test_answers_are_those_of_triton(server: Server, method: str, path: str) -> None:
    assert ask(server, method, path) == ask(server, method, path, inner=True)


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
@pytest.mark.parametrize("model", ["echo", "text_plain"])
def test_generated_text_is_that_of_triton(server: Server, model: str, verb: str) -> None:
    for body in ({"text_input": "one two three", "max_tokens": 3}, {"text_input": "fail", "max_tokens": 1, "id": "7"}):
        path = f"/v2/models/{model}/{verb}"
        # curl's type for -d, as in NVIDIA's tutorials
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        assert ask(server, "POST", path, body, form) == ask(server, "POST", path, body, inner=True)


def test_an_unknown_key_of_generate_is_refused(server: Server) -> None:
    status, text = ask(server, "POST", "/v2/models/echo/generate", {"text_input": "a", "max_tokns": 3})
    assert status == 400
    assert "max_tokens" in json.loads(text)["error"]


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_tritonclient_notices_nothing(server: Server, compression: str | None, binary: bool) -> None:
    inputs = []
    for name, values in {"input_ids": [[5, 6, 7]], "input_lengths": [[3]], "request_output_len": [[4]]}.items():
        array = np.array(values, dtype=np.int32)
        inputs.append(tritonclient.InferInput(name, array.shape, "INT32"))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    outputs = [tritonclient.InferRequestedOutput("output_ids", binary_data=binary)]
    with closing(tritonclient.InferenceServerClient(f"127.0.0.1:{server.address.http_port}")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("core_plain")
        assert client.get_server_metadata()["name"] == "triton"
        assert {each["name"] for each in client.get_model_repository_index()} >= {"echo", "core_plain"}
        for request_id in ("", "mine"):
            result = client.infer(
                "core_plain",
                inputs,
                outputs=outputs,
                request_id=request_id,
                request_compression_algorithm=compression,
                response_compression_algorithm=compression,
            )
            assert result.as_numpy("output_ids").reshape(-1).tolist() == [5, 6, 7, 5, 6, 7, 5]
            assert result.get_response().get("id", "") == request_id
        statistics = client.get_inference_statistics("core_plain")["model_stats"][0]
        assert statistics["inference_count"] >= 2
        with pytest.raises(InferenceServerException, match="closed on this server"):
            client.register_system_shared_memory("r", "/r", 8)


def leave_early(server: Server, model: str, body: Mapping[str, Any], *, then: bytes = b"") -> None:
    """Send a request that runs for seconds, and close the connection when it has begun.

    `then` is sent with it, without waiting for its answer.
    """
    content = json.dumps(body).encode()
    head = (
        f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.address.http_port), timeout=30) as connection:
        connection.sendall(head.encode() + content + then)
        wait_until(lambda: f"began {body['id']}" in trace(server))


def trace(server: Server) -> str:
    file = server.repository.parent / "trace"
    return file.read_text() if file.exists() else ""


def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    leave_early(server, "echo", {**FOREVER, "id": "left-echo"})
    assert eventually(lambda: "cancelled left-echo" in trace(server))
    # Triton does not notice it for models that answer once, so the engine is asked to stop the request.
    leave_early(server, "text_plain", {**FOREVER, "id": "left-plain"})
    assert eventually(lambda: "stop left-plain" in trace(server))
    second = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    leave_early(server, "text_plain", {**FOREVER, "id": "left-first"}, then=second)
    assert eventually(lambda: "stop left-first" in trace(server))


def test_pages_of_other_sites_are_refused(server: Server) -> None:
    body = {"text_input": "a", "max_tokens": 1}
    path = "/v2/models/echo/generate"
    for foreign in ("https://evil.example", "http://["):
        assert ask(server, "POST", path, body, {**JSON, "Origin": foreign})[0] == 403
    assert ask(server, "POST", path, body, {**JSON, "Host": "evil.example"})[0] == 421
    own = f"http://127.0.0.1:{server.address.http_port}"
    assert ask(server, "POST", path, body, {**JSON, "Origin": own})[0] == 200


def test_other_pages_of_the_gateway(server: Server) -> None:
    for path in ("/health", "/health/ready"):
        assert ask(server, "GET", path) == (200, b'{"status":"ready"}')
    assert "version" in json.loads(ask(server, "GET", "/version")[1])
    assert b"nv_inference_request_success" in ask(server, "GET", "/metrics")[1]


def test_an_executor_that_has_stopped_working_makes_its_model_not_ready(
    server: Server, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(server.name, Store(root / "home"))
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv(VARIABLE, str(folder))
    heart = Heartbeat("tensorrt_llm")
    heart.beat(open_requests=0, progress=0, failure="out of memory")
    wait_until(lambda: ask(server, "GET", "/v2/models/tensorrt_llm/ready")[0] == 503)
    status, text = ask(server, "GET", "/v2/health/ready")
    assert status == 503
    assert "out of memory" in json.loads(text)["error"]
    assert ask(server, "GET", "/v2/models/core_plain/ready")[0] == 200
    heart.close()
    wait_until(lambda: ask(server, "GET", "/v2/health/ready")[0] == 200)


def stub_of(server: Server, model: str) -> ProcessId:
    (found,) = (stub for stub in server.instances[0].stubs if f"/{model}/1/model.py" in " ".join(arguments(stub)))
    return found


def test_a_dead_stub_makes_its_model_not_ready_and_ends_its_requests(server: Server) -> None:
    with connected(server) as connection:
        connection.request("POST", "/v2/models/echo/generate_stream", json.dumps({**FOREVER, "id": "lost"}), JSON)
        response = connection.getresponse()
        assert response.readline().startswith(b"data:")
        os.kill(stub_of(server, "echo").pid, signal.SIGKILL)
        events = response.read().decode()
    assert "has ended" in events.splitlines()[-2]
    assert ask(server, "GET", "/v2/models/echo/ready")[0] == 503
    assert ask(server, "GET", "/v2/health/ready")[0] == 503
    assert ask(server, "GET", "/health")[0] == 503
    assert ask(server, "POST", "/v2/models/echo/generate", {"text_input": "a", "max_tokens": 1})[0] == 503
    assert ask(server, "GET", "/v2/models/core_plain/ready")[0] == 200
    assert ask(server, "GET", "/v2/health/live")[0] == 200


def test_the_gateway_finishes_its_requests_before_it_ends(server: Server) -> None:
    gateway = server.instances[0].gateway
    assert gateway is not None
    body = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": 100, "streaming": True, "id": "last"}
    with connected(server) as connection, connected(server) as other:
        connection.request("POST", "/v2/models/core_slow/generate_stream", json.dumps(body), JSON)
        wait_until(lambda: "began last" in trace(server))
        other.request("GET", "/v2/health/ready")
        other.getresponse().read()
        os.kill(gateway.process.pid, signal.SIGTERM)
        assert eventually(lambda: _answer(other) == 503)
        assert connection.getresponse().read().count(b"data:") == 100
    wait_until(lambda: not gateway.process.alive())


def _answer(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/v2/health/ready")
    response = connection.getresponse()
    response.read()
    return response.status


def test_triton_gives_back_the_memory_of_large_grpc_messages(server: Server) -> None:
    """Of the same size each, Triton would keep eight of them for reuse."""
    given = InferInput("text_input", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[b"a" * (32 << 20)]], object))
    (instance,) = server.instances
    with closing(InferenceServerClient(f"127.0.0.1:{server.address.grpc_port}")) as client:
        before = process_bytes(instance.process.pid)
        for _ in range(6):
            with pytest.raises(InferenceServerException):
                client.infer("unknown", [given])
        assert process_bytes(instance.process.pid) - before < 80 << 20

"""HTTP and metrics endpoints of the tritonserver double: health, index, configuration, metadata (KServe v2 paths)."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.doubles.model_configs import Model

_METRICS = """# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
"""


class State:
    """What the handlers answer from."""

    def __init__(self, models: dict[str, Model], version: str) -> None:
        """Serve these models; `version` is Triton's."""
        self.models = models
        self.version = version
        self.alive = True

    def answer(self, path: str) -> tuple[int, Any]:
        """Status and body of a GET; None for an empty body."""
        parts = path.partition("?")[0].strip("/").split("/")
        if parts == ["v2"]:
            return 200, {"name": "triton", "version": self.version, "extensions": ["model_repository"]}
        if parts in (["v2", "health", "ready"], ["v2", "health", "live"]):
            return (200 if self.alive else 400), None
        if parts[:2] == ["v2", "models"] and len(parts) >= 3:
            return self._model(parts[2], parts[3:])
        return 404, {"error": "Not Found"}

    def _model(self, name: str, rest: list[str]) -> tuple[int, Any]:
        model = self.models.get(name)
        if rest[:1] == ["versions"]:
            rest = rest[2:]
        if model is None:
            if rest == ["ready"]:
                return 400, None
            return 404, {"error": f"Request for unknown model: '{name}' is not found"}
        if rest == ["ready"]:
            return 200, None
        if rest == ["config"]:
            from google.protobuf import json_format

            return 200, json_format.MessageToDict(model.config, preserving_proto_field_name=True)
        if not rest:
            return 200, self._metadata(model)
        return 404, {"error": "Not Found"}

    def _metadata(self, model: Model) -> dict[str, Any]:
        def tensors(messages: Any) -> list[dict[str, Any]]:
            batch = [-1] if model.config.max_batch_size else []
            names = messages[0].DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number if messages else {}
            return [
                {
                    "name": tensor.name,
                    "datatype": names[tensor.data_type].name.removeprefix("TYPE_").replace("STRING", "BYTES"),
                    "shape": [*batch, *tensor.dims],
                }
                for tensor in messages
            ]

        return {
            "name": model.name,
            "versions": ["1"],
            "platform": model.backend,
            "inputs": tensors(model.config.input),
            "outputs": tensors(model.config.output),
        }

    def index(self) -> list[dict[str, str]]:
        """The repository index."""
        return [{"name": name, "version": "1", "state": "READY", "reason": ""} for name in self.models]


def _handler(state: State, metrics: bool) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if metrics:
                self._send(200 if self.path == "/metrics" else 404, _METRICS.encode(), "text/plain; charset=utf-8")
                return
            status, body = state.answer(self.path)
            self._send(status, b"" if body is None else json.dumps(body).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            if not metrics and self.path == "/v2/repository/index":
                self._send(200, json.dumps(state.index()).encode())
            else:
                self._send(404, b'{"error": "Not Found"}')

        def log_message(self, *_arguments: Any) -> None:
            """Nothing: Triton does not log requests either."""

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    allow_reuse_port = False


def serve(address: str, port: int, state: State, *, metrics: bool = False) -> ThreadingHTTPServer:
    """Open a port and answer on it from a thread; OSError when it is in use."""
    server = _Server((address, port), _handler(state, metrics))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
    return server


def listen(address: str, port: int) -> socket.socket:
    """Open a port that only accepts: who asks whether it is taken finds it taken."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
    except OSError:
        listening.close()
        raise
    listening.listen()
    return listening

"""HTTP and metrics endpoints of the tritonserver double: health and index (KServe v2 paths)."""

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
    """The data of the handlers."""

    def __init__(self, models: dict[str, Model], version: str) -> None:
        """Serve these models; `version` is Triton's."""
        self.models = models
        self.version = version
        self.alive = True

    def answer(self, path: str) -> tuple[int, Any]:
        """Return status and body of a GET; None for an empty body."""
        parts = path.partition("?")[0].strip("/").split("/")
        if parts == ["v2"]:
            return 200, {"name": "triton", "version": self.version, "extensions": ["model_repository"]}
        if parts in (["v2", "health", "ready"], ["v2", "health", "live"]):
            return (200 if self.alive else 400), None
        return 404, {"error": "Not Found"}

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
    """Open a port that only accepts connections, so that it counts as taken."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
    except OSError:
        listening.close()
        raise
    listening.listen()
    return listening

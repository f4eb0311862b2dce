"""A receiver of OpenTelemetry traces (OTLP over HTTP, in JSON), which keeps what it gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class TraceReceiver:
    """The spans that have arrived."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[dict[str, Any]] = []

    def names(self, trace: str) -> set[str]:
        """Names of the spans of a trace, by its id in hexadecimal."""
        return {span["name"] for span in list(self.spans) if span["traceId"] == trace}


@contextmanager
def trace_receiver() -> Iterator[TraceReceiver]:
    """Listen on a free port until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in content["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    receiver.spans += scope["spans"]
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = TraceReceiver(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()

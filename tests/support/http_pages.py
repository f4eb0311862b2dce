"""Servers that answer each path with a page of the test, or with bytes that need not be HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import chain, repeat
from socketserver import BaseServer, StreamRequestHandler, ThreadingTCPServer
from threading import Event, Thread

ENDLESS = {
    "headers": (b"HTTP/1.1 200 OK\r\nA: ", b"x"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}
"""Answers of which a little comes every hundredth of a second: how they begin, and how they go on."""


def endless(what: str) -> Iterator[bytes]:
    """Yield an answer of `ENDLESS`."""
    begin, more = ENDLESS[what]
    return chain([begin], repeat(more))


@contextmanager
def answering(page: Callable[[str], str]) -> Iterator[int]:
    """Answer GET and POST with the `page` of a path; yields the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page(self.path).encode(errors="surrogatepass")
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server, _serving(server):
        yield server.server_address[1]


@contextmanager
def sending(answer: Callable[[str], Iterator[bytes]]) -> Iterator[tuple[int, list[str]]]:
    """Send the pieces of the `answer` to a path, one every hundredth of a second; yields the port and the requests."""
    asked: list[str] = []
    over = Event()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            head = "".join(iter(lambda: self.rfile.readline().decode("latin-1").strip("\r\n"), ""))
            asked.append(head)
            with suppress(OSError):
                for piece in answer(head.split()[1]):
                    self.wfile.write(piece)
                    if over.wait(0.01):
                        return

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server, _serving(server):
        try:
            yield server.server_address[1], asked
        finally:
            over.set()


@contextmanager
def _serving(server: BaseServer) -> Iterator[None]:
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()

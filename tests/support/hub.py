"""A hub on the loopback interface: it answers the real huggingface_hub client and imitates the faults of real hubs."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_BLOCK = 16 * 1024


@dataclass
class HubModel:
    """One repository of the hub, and how it misbehaves.

    `cut` maps a file to the number of bytes after which the connection is dropped, `cuts` times in all. `wrong_hash`
    and `wrong_size` are files whose metadata is wrong. `bytes_per_second` slows down every file. With `redirects`,
    large files come from another host, as from the real hub's content network. `busy` maps a file, or "" for the list
    of files, to the statuses of its next answers, with `retry_after` as their header. `elsewhere` is the address of
    another host, to which every request is redirected. `lie` changes the list of files, `lying_headers` those of each
    file. An `endless` file ("": the list of files) is sent without its length until the client leaves, or for 256 MiB.
    A `trickling` file has headers that come one by one, for two seconds.
    """

    folder: Path
    commit: str
    token: str | None = None
    gated: bool = False
    forbidden: bool = False
    failing: int | None = None
    busy: dict[str, list[int]] = field(default_factory=dict)
    retry_after: str | None = None
    elsewhere: str | None = None
    lists_sizes: bool = True
    ranges: bool = True
    cut: dict[str, int] = field(default_factory=dict)
    cuts: int = 1
    wrong_hash: set[str] = field(default_factory=set)
    wrong_size: dict[str, int] = field(default_factory=dict)
    bytes_per_second: int | None = None
    redirects: bool = False
    lie: Callable[[dict[str, Any]], object] | None = None
    lying_headers: dict[str, str] = field(default_factory=dict)
    endless: set[str] = field(default_factory=set)
    trickling: set[str] = field(default_factory=set)

    def names(self) -> list[str]:
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size + self.wrong_size.get(name, 0)

    def sha256(self, name: str) -> str:
        content = b"lie" if name in self.wrong_hash else (self.folder / name).read_bytes()
        return hashlib.sha256(content).hexdigest()

    def blob(self, name: str) -> str:
        content = b"lie" if name in self.wrong_hash else (self.folder / name).read_bytes()
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()

    def is_large(self, name: str) -> bool:
        return name.endswith((".safetensors", ".bin", ".gguf"))

    def sibling(self, name: str) -> dict[str, Any]:
        if not self.lists_sizes:
            return {"rfilename": name}
        entry: dict[str, Any] = {"rfilename": name, "size": self.size(name), "blobId": self.blob(name)}
        if self.is_large(name):
            entry["lfs"] = {"size": self.size(name), "sha256": self.sha256(name), "pointerSize": 134}
        return entry


@dataclass(frozen=True)
class Request:
    """One request as the hub saw it."""

    method: str
    path: str
    byte_range: str | None
    token: str | None
    host: str = ""


class Hub:
    """Repositories by id, and the requests that came."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.models: dict[str, HubModel] = {}
        self.requests: list[Request] = []
        self.sent_bytes = 0

    def add(self, repository: str, folder: Path, **faults: Any) -> HubModel:
        """Serve `folder` as `repository`; the commit follows from the id."""
        commit = hashlib.sha1(repository.encode(), usedforsecurity=False).hexdigest()
        self.models[repository] = HubModel(folder=folder, commit=commit, **faults)
        return self.models[repository]

    def asked_for(self, name: str, method: str = "GET") -> list[Request]:
        """Requests for the content of the file `name`."""
        return [r for r in self.requests if r.method == method and r.path.endswith("/" + name)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: Any) -> None:
        """Print nothing: stderr belongs to the test."""

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append(
            Request(self.command, path, self.headers.get("Range"), token, self.headers.get("Host", ""))
        )
        parts = path.strip("/").split("/")
        if parts == ["api", "whoami-v2"]:
            self._answer_owner(token)
        elif parts[:2] == ["api", "models"]:
            self._answer_listing("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main", token)
        elif parts[0] == "cdn":
            self._send_file(self.hub.models["/".join(parts[1:3])], "/".join(parts[3:]), {}, with_body)
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), token, with_body)
        else:
            self._fail(404, "EntryNotFound")

    def _answer_owner(self, token: str | None) -> None:
        if token in (None, "revoked"):
            return self._fail(401, None, "Invalid credentials in Authorization header")
        owner = {"type": "user", "name": "somebody"}
        return self._send(json.dumps(owner).encode(), {"Content-Type": "application/json"})

    def _answer_listing(self, repository: str, revision: str, token: str | None) -> None:
        model = self.hub.models.get(repository)
        if model is None:
            # The real hub hides what exists from those without a token.
            return self._fail(404 if token else 401, "RepoNotFound")
        if model.failing:
            return self._fail(model.failing, None)
        if self._fails_for_now(model, "") or self._redirected(model):
            return None
        if token == "revoked":
            return self._fail(401, None, "Invalid credentials in Authorization header")
        if revision not in ("main", model.commit):
            return self._fail(404, "RevisionNotFound")
        if "" in model.endless:
            return self._send_endlessly({"Content-Type": "application/json"})
        listing = {"id": repository, "sha": model.commit, "siblings": [model.sibling(n) for n in model.names()]}
        answer = listing if model.lie is None else model.lie(listing)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        return self._send(content, {"Content-Type": "application/json"})

    def _answer_file(self, repository: str, revision: str, name: str, token: str | None, with_body: bool) -> None:
        model = self.hub.models[repository]
        if self._fails_for_now(model, name) or self._redirected(model):
            return None
        if model.gated and token != model.token:
            return self._fail(403 if token else 401, "GatedRepo")
        if model.forbidden:
            return self._fail(403, None, "Forbidden")
        if name not in model.names() or revision not in ("main", model.commit):
            return self._fail(404, "EntryNotFound")
        headers = {"X-Repo-Commit": model.commit, "ETag": f'"{model.blob(name)}"', "Accept-Ranges": "bytes"}
        if model.is_large(name):
            headers |= {"X-Linked-Etag": f'"{model.sha256(name)}"', "X-Linked-Size": str(model.size(name))}
            if model.redirects:
                other_host = self.hub.endpoint.replace("127.0.0.1", "localhost")
                return self._send(b"", headers | {"Location": f"{other_host}/cdn/{repository}/{name}"}, 302)
        if name in model.trickling and with_body:
            self.send_response(200)
            for _ in range(200):
                self.send_header("X-More", "1")
                self.flush_headers()
                time.sleep(0.01)
        if name in model.endless and with_body:
            return self._send_endlessly(headers)
        return self._send_file(model, name, headers | model.lying_headers, with_body)

    def _send_endlessly(self, headers: dict[str, str]) -> None:
        self.send_response(200)
        for key, value in (headers | {"Connection": "close"}).items():
            self.send_header(key, value)
        self.end_headers()
        block = b"x" * (1 << 20)
        try:
            for _ in range(256):
                self.wfile.write(block)
                self.hub.sent_bytes += len(block)
        except (BrokenPipeError, ConnectionResetError):
            pass
        self.close_connection = True

    def _fails_for_now(self, model: HubModel, name: str) -> bool:
        """Answer with the next of the statuses for a file, if one is left."""
        if not model.busy.get(name):
            return False
        headers = {} if model.retry_after is None else {"Retry-After": model.retry_after}
        self._send(b"{}", headers, model.busy[name].pop(0))
        return True

    def _redirected(self, model: HubModel) -> bool:
        """Send the client elsewhere, unless it is there already."""
        own = self.headers.get("Host", "") == urlsplit(self.hub.endpoint).netloc
        if model.elsewhere is None or not own:
            return False
        self._send(b"", {"Location": model.elsewhere + self.path}, 302)
        return True

    def _send_file(self, model: HubModel, name: str, headers: dict[str, str], with_body: bool) -> None:
        content = (model.folder / name).read_bytes()
        start, stop = self._range(len(content)) if model.ranges else (0, len(content))
        if start >= len(content) > 0:
            return self._fail(416, None)
        part = stop - start < len(content)
        self.send_response(206 if part else 200)
        if part:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        for key, value in (headers | {"Content-Length": str(stop - start)}).items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self._send_body(model, name, content[start:stop])
        return None

    def _send_body(self, model: HubModel, name: str, content: bytes) -> None:
        if name in model.cut and model.cuts > 0:
            model.cuts -= 1
            self.wfile.write(content[: model.cut[name]])
            self.close_connection = True
            return
        for begin in range(0, len(content), _BLOCK):
            block = content[begin : begin + _BLOCK]
            if model.bytes_per_second:
                time.sleep(len(block) / model.bytes_per_second)
            self.hub.sent_bytes += len(block)
            try:
                self.wfile.write(block)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
                return

    def _range(self, size: int) -> tuple[int, int]:
        """Return the first byte requested and the one after the last."""
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        return int(first), min(int(last) + 1, size) if last else size

    def _fail(self, status: int, code: str | None, message: str = "") -> None:
        headers = {"X-Error-Message": message} if message else {}
        if code is not None:
            headers["X-Error-Code"] = code
        self._send(json.dumps({"error": message or code}).encode(), headers, status)

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub on a free port of the loopback interface; ended with the block."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    handler.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)

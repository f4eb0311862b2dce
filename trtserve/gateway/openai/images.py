"""The images of a conversation: from data URLs, and from the folder and the hosts that the operator allows."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import SplitResult, unquote, urlsplit

from trtserve.gateway.openai.errors import ApiError

_MOST_IMAGES = 64
_MOST_BYTES = 20 << 20  # of one image
_MOST_BYTES_TOGETHER = 64 << 20
_SECONDS = 20.0
# A slow disk or host takes no other thread, and at most 8 images are in memory before the gate knows of them.
_READERS = ThreadPoolExecutor(8, "images")
# How PNG, JPEG, GIF and WebP begin. The engine looks at their size in pixels before it decodes them.
_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")


@dataclass(frozen=True, kw_only=True)
class ImageSources:
    """Where the URLs of images may lead, besides data in the URL itself."""

    folder: Path | None = None
    hosts: tuple[str, ...] = ()
    """HOST or HOST:PORT, as in the URL."""

    async def load(self, urls: Sequence[str], reserve: Callable[[int], None]) -> tuple[bytes, ...]:
        """Return the files, whose bytes are reserved one by one.

        Raises ApiError for one that may not be read, is not an image, or is too large.
        """
        if len(urls) > _MOST_IMAGES:
            raise ApiError(f"The conversation has {len(urls)} images; at most {_MOST_IMAGES} are allowed.")
        found: list[bytes] = []
        for url in urls:
            readers = None if url[:5].lower() == "data:" else _READERS
            data = await asyncio.get_running_loop().run_in_executor(readers, self._read, url)
            reserve(len(data))
            if not data.startswith(_BEGINNINGS) and not (data.startswith(b"RIFF") and data[8:12] == b"WEBP"):
                raise ApiError(f"{_shown(url)} is not a PNG, JPEG, WebP or GIF.", param="messages")
            found.append(data)
            if sum(map(len, found)) > _MOST_BYTES_TOGETHER:
                raise ApiError(f"The images have more than {_MOST_BYTES_TOGETHER >> 20} MiB together.", status=413)
        return tuple(found)

    def _read(self, url: str) -> bytes:
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return _data(url)
        if scheme == "file":
            return self._file(url)
        if scheme in ("http", "https"):
            return self._fetched(url)
        raise ApiError(f"{_shown(url)} is not a URL of an image; expected data:image/…;base64,…", param="messages")

    def _file(self, url: str) -> bytes:
        if self.folder is None:
            raise ApiError(
                f"{_shown(url)}: local files are not read here; send a data URL, or start with --image-folder DIR.",
                param="messages",
            )
        parts = urlsplit(url)
        path, folder = Path(unquote(parts.path)), self.folder.resolve()
        try:
            path = path.resolve()
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(folder) or not path.is_file():
                raise ApiError(f"{_shown(url)} is not a file below the folder for images.", param="messages")
            with path.open("rb") as file:
                return _bounded(url, file)
        except (OSError, ValueError, RuntimeError):  # the last for a loop of links, before Python 3.13
            raise ApiError(f"{_shown(url)} cannot be read.", param="messages") from None

    def _fetched(self, url: str) -> bytes:
        late = threading.Event()
        try:
            parts = urlsplit(url)
            if parts.netloc.lower() in map(str.lower, self.hosts):
                return _answer(url, parts, late)
        except (OSError, ValueError, http.client.HTTPException) as error:
            problem = f"cannot be fetched: {str(error)[:200]}"
            if late.is_set() or isinstance(error, TimeoutError):
                problem = f"did not arrive within {_SECONDS:g} s"
            raise ApiError(f"{_shown(url)} {problem}.", param="messages") from None
        raise ApiError(
            f"{_shown(url)}: this server fetches no images from there; send a data URL, or start with "
            "--image-host HOST.",
            param="messages",
        )


def _answer(url: str, parts: SplitResult, late: threading.Event) -> bytes:
    """Fetch a URL. Redirects are not followed: an allowed host must not send the server to another one."""
    secure, name = parts.scheme == "https", parts.hostname or ""
    port = parts.port or (443 if secure else 80)
    with socket.create_connection((name, port), _SECONDS) as plain, _cut(plain, late):
        connection = http.client.HTTPConnection(name, port)
        context = ssl.create_default_context() if secure else None
        with plain if context is None else context.wrap_socket(plain, server_hostname=name) as connection.sock:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"Host": parts.netloc, "Connection": "close"})
            with connection.getresponse() as answer:
                data = _bounded(url, answer) if answer.status == http.HTTPStatus.OK else None
    if late.is_set() or data is None:
        raise ValueError(f"HTTP {answer.status}")
    return data


@contextlib.contextmanager
def _cut(connection: socket.socket, late: threading.Event) -> Iterator[None]:
    """End the connection at the time limit, and set `late`: a time-out of a socket begins again with every byte."""
    copy = connection.dup()  # TLS takes the first one over

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            copy.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_SECONDS, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        copy.close()


def _data(url: str) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ApiError(f"{_shown(url)} must have its data in base64: data:image/png;base64,…", param="messages")
    if len(text) * 3 // 4 > _MOST_BYTES:
        raise ApiError(f"An image has more than {_MOST_BYTES >> 20} MiB.", status=413)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(f"{_shown(url)} has data that is not base64.", param="messages") from None


def _bounded(url: str, file: BinaryIO | http.client.HTTPResponse) -> bytes:
    """Read a file or an answer."""
    data = bytearray()
    while piece := file.read(1 << 16):
        data += piece
        if len(data) > _MOST_BYTES:
            raise ApiError(f"{_shown(url)} has more than {_MOST_BYTES >> 20} MiB.", status=413)
    return bytes(data)


def _shown(url: str) -> str:
    return f"The image {url[:60]!r}"

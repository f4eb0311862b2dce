"""The images of a conversation: from data URLs, and from the folder and the hosts that the operator allows."""

from __future__ import annotations

import asyncio
import base64
import binascii
import http.client
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trtserve.gateway.openai.errors import ApiError

_MOST_IMAGES = 64
_MOST_BYTES = 20 << 20  # of one image
_MOST_BYTES_TOGETHER = 64 << 20
_SECONDS = 20.0
# How PNG, JPEG, GIF and WebP begin. The engine looks at their size in pixels before it decodes them.
_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")


@dataclass(frozen=True, kw_only=True)
class ImageSources:
    """Where the URLs of images may lead, besides data in the URL itself."""

    folder: Path | None = None
    hosts: tuple[str, ...] = ()
    """HOST or HOST:PORT, as in the URL."""

    async def load(self, urls: Sequence[str]) -> tuple[bytes, ...]:
        """Return the files. Raises ApiError for one that may not be read, is none, or is too large."""
        if len(urls) > _MOST_IMAGES:
            raise ApiError(f"The conversation has {len(urls)} images; at most {_MOST_IMAGES} are allowed.")
        found: list[bytes] = []
        for url in urls:
            data = await asyncio.to_thread(self._read, url)
            if not data.startswith(_BEGINNINGS) and not (data.startswith(b"RIFF") and data[8:12] == b"WEBP"):
                raise ApiError(f"{_shown(url)} is no PNG, JPEG, WebP or GIF.", param="messages")
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
        raise ApiError(f"{_shown(url)} is no URL of an image; expected data:image/…;base64,…", param="messages")

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
        except (OSError, ValueError):
            raise ApiError(f"{_shown(url)} cannot be read.", param="messages") from None

    def _fetched(self, url: str) -> bytes:
        try:
            host = urlsplit(url).netloc.lower()
        except ValueError:
            host = ""
        if host not in map(str.lower, self.hosts):
            raise ApiError(
                f"{_shown(url)}: this server fetches no images from there; send a data URL, or start with "
                "--image-host HOST.",
                param="messages",
            )
        try:
            with urllib.request.build_opener(_NoRedirects).open(url, timeout=_SECONDS) as answer:
                return _bounded(url, answer)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ApiError(f"{_shown(url)} cannot be fetched: {str(error)[:200]}.", param="messages") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """An allowed host must not send the server to another one."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


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


def _bounded(url: str, file: Any) -> bytes:
    """Read a file or an answer, within the bounds of size and time."""
    until, data = time.monotonic() + _SECONDS, bytearray()
    while piece := file.read(1 << 16):
        data += piece
        if len(data) > _MOST_BYTES:
            raise ApiError(f"{_shown(url)} has more than {_MOST_BYTES >> 20} MiB.", status=413)
        if time.monotonic() > until:
            raise ApiError(f"{_shown(url)} did not arrive within {_SECONDS:g} s.", param="messages")
    return bytes(data)


def _shown(url: str) -> str:
    return f"The image {url[:60]!r}"

"""A line of JSON for each request, in a file that only this user can read. It has no texts unless that is asked for."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from trtserve.errors import UsageError
from trtserve.gateway.admission import Exchange
from trtserve.gateway.asgi import Scope

_LONGEST_TEXT = 1 << 20  # bytes of a body that is kept


class RequestLog:
    """The log of one process; several append to the same file. One that was moved away is begun again."""

    def __init__(self, path: Path, *, texts: bool) -> None:
        """Raises UsageError for a file that cannot be written."""
        self._path, self.texts = path, texts
        self._torn = False
        """Whether the disk had room for a part of the last line only; the next one begins on a line of its own."""
        try:
            handle = self._open()
        except OSError as error:
            raise UsageError(f"--request-log {path} cannot be written: {error.strerror}.") from error
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise UsageError(
                    f"--request-log {path} is not a file.", hint="Name a file, or one that does not exist."
                )
        finally:
            os.close(handle)

    def add(self, scope: Scope, exchange: Exchange, status: int | None) -> None:
        """Write what became of a request; `status` is None if its client left before the answer began."""
        seconds = time.monotonic() - exchange.started
        entry: dict[str, Any] = {
            "time": round(time.time() - seconds, 3),  # when it came: the file is a trace for `bench replay` and `tune`
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            **exchange.log,
        }
        if exchange.refusal is not None:
            entry["refused"] = exchange.refusal.text
        try:
            handle = self._open()
            try:
                line = to_json(entry, bytes_mode="utf8", inf_nan_mode="strings") + b"\n"
                line = b"\n" + line if self._torn else line
                self._torn = os.write(handle, line) < len(line)
            finally:
                os.close(handle)
        except OSError:  # a full disk is not the request's fault
            return

    def _open(self) -> int:
        # A pipe that nobody reads would hold up the gateway.
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)

    @staticmethod
    def body(content: bytes) -> Any:
        """Return a body as the log shows it."""
        try:
            return from_json(content) if len(content) <= _LONGEST_TEXT else f"{len(content)} bytes"
        except ValueError:
            return f"{len(content)} bytes that are no JSON"

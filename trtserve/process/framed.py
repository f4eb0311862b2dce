"""A child process that leads a group of its own, and speaks in MessagePack values behind their lengths."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

import msgspec

_LENGTH = struct.Struct("<I")
_LAST_SECONDS = 10.0


class FramedProcess:
    """A command whose standard input and output are frames: a length in four bytes, little endian, and a value.

    One thread may read while another one writes.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._input: IO[bytes] = self._child.stdin
        self._output: IO[bytes] = self._child.stdout
        self._encode = msgspec.msgpack.Encoder().encode
        threading.Thread(target=self._end_group, daemon=True).start()

    @property
    def pid(self) -> int:
        """The process, and the group that it makes for itself when it starts."""
        return self._child.pid

    def send(self, value: Any) -> None:
        """Write a value. One that has ended does not read it, which `read` finds."""
        data = self._encode(value)
        with contextlib.suppress(OSError, ValueError):
            self._input.write(_LENGTH.pack(len(data)) + data)
            self._input.flush()

    def read(self) -> Any:
        """Wait for the next value; None when the process has ended."""
        head = self._output.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        data = self._output.read(_LENGTH.unpack(head)[0])
        return msgspec.msgpack.decode(data)

    def runs(self) -> bool:
        """Return whether the process has not ended."""
        return self._child.poll() is None

    def finish(self) -> None:
        """End its input."""
        with contextlib.suppress(OSError):
            self._input.close()

    def wait(self) -> int | None:
        """Return the exit code, or None when the process does not end within some seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._child.wait(_LAST_SECONDS)
        return None

    def kill(self) -> None:
        """End the process and all others of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.kill()  # it may not lead its group yet
        self.wait()

    def _end_group(self) -> None:
        """End what it leaves behind: forked children have its pipe too, so `read` would wait for their end."""
        self._child.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close both pipes, when nobody reads or writes any more."""
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()

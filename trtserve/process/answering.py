"""Child processes that answer: one request after the other within bounds of the kernel, or in frames over pipes."""

from __future__ import annotations

import atexit
import contextlib
import json
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import msgspec

from trtserve.process import how_it_ended, kill_group


class AnsweringProcess:
    """Starts a command with its first request and keeps it; each request and each answer is one line of JSON.

    The command ends when its input ends. It may end earlier; the next request starts it again. `greeting` makes a
    request that each process gets first, for what it should know; its answer is not used.
    """

    def __init__(self, argv: Sequence[str], greeting: Callable[[], Mapping[str, Any]] | None = None) -> None:
        self._argv = argv
        self._greeting = greeting
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        atexit.register(self._end)

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Return the answer. Raises TimeoutError when a timer ended the process, and ChildProcessError otherwise."""
        with self._lock:
            answer, code = self._answer(request)
            if code in (0, -signal.SIGKILL):  # it had ended by itself after its last answer, or was killed
                answer, code = self._answer(request)
        if code is None:
            return json.loads(answer)
        if code in (-signal.SIGALRM, -signal.SIGPROF, -signal.SIGVTALRM):
            raise TimeoutError
        raise ChildProcessError(how_it_ended(code))

    def close(self) -> None:
        """End the process, after the request that it answers now. A further request starts it again."""
        with self._lock:
            self._end()
        atexit.unregister(self._end)

    def _answer(self, request: Mapping[str, Any]) -> tuple[bytes, int | None]:
        """Return the line that the process answers, or the exit code with which it ended instead."""
        requests = [request]
        child = self._child
        if child is None or child.poll() is not None:
            self._end()
            if self._greeting is not None:
                requests.insert(0, self._greeting())
            child = self._child = subprocess.Popen(
                self._argv,
                cwd="/",  # Python imports modules from the working directory
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us
            )
        stdin, stdout = child.stdin, child.stdout
        assert stdin is not None
        assert stdout is not None
        answer = b""
        try:
            for each in requests:
                stdin.write(json.dumps(each).encode() + b"\n")
                stdin.flush()
                answer = stdout.readline()
        except BrokenPipeError:
            answer = b""
        except BaseException:  # an interrupt: the answer that still comes would be taken for the next one
            self._end()
            raise
        return answer, None if answer.endswith(b"\n") else child.wait()

    def _end(self) -> None:
        child, self._child = self._child, None  # at the end of the program, another thread may do the same
        if child is not None:
            child.kill()
            child.communicate()


_MATCHER = """
import json, re, resource, signal, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for line in sys.stdin.buffer:
    asked = json.loads(line)
    signal.alarm(asked["seconds"])
    compiled, invalid = [], None
    for pattern in asked["patterns"]:
        try:
            compiled.append(re.compile(pattern))
        except Exception as error:
            invalid = [pattern, str(error) or type(error).__name__]
            break
    found = None
    if invalid is None:
        found = [next((n for n, each in enumerate(compiled) if each.match(text)), None) for text in asked["texts"]]
    sys.stdout.write(json.dumps({"invalid": invalid, "found": found}) + chr(10))
    sys.stdout.flush()
    signal.alarm(0)
"""
_matcher = AnsweringProcess((sys.executable, "-c", _MATCHER))


def first_matches(patterns: Sequence[str], texts: Sequence[str], *, seconds: int) -> list[int | None]:
    """Return for each text the number of the first regular expression that matches at its start, or None.

    For expressions by strangers, which can take for ever: they run in a process of their own. Raises TimeoutError after
    `seconds`, and ValueError for an expression that is invalid or takes too much memory.
    """
    try:
        answer = _matcher.ask({"patterns": list(patterns), "texts": list(texts), "seconds": seconds})
    except ChildProcessError as error:
        raise ValueError(f"the process that tries them {error}") from None
    if answer["invalid"] is not None:
        pattern, reason = answer["invalid"]
        raise ValueError(f"{pattern[:100]!r} is invalid: {reason}")
    found: list[int | None] = answer["found"]
    return found


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
        kill_group(self._child.pid)
        self._child.kill()  # it may not lead its group yet
        self.wait()

    def _end_group(self) -> None:
        """End what it leaves behind: forked children have its pipe too, so `read` would wait for their end."""
        self._child.wait()
        kill_group(self._child.pid)

    def close(self) -> None:
        """Close both pipes, when nobody reads or writes any more."""
        for pipe in (self._input, self._output):
            with contextlib.suppress(OSError):
                pipe.close()

"""A child process that answers requests one after the other, for work that the kernel must bound."""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtserve.process import how_it_ended


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

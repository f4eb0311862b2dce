"""Encode texts in a process with bounds on time and memory that the kernel keeps.

A tokenizer is data by an unknown author: its normalizer may multiply a text, and its expressions may take hours. The
process reads the tokenizer once and answers in a fork of itself: when one is ended, the next is there in a moment.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MEMORY = 1 << 30  # bytes, besides the tokenizer's
_LEAST = 0.001  # seconds; a timer of none never ends
_SLOWEST = 10  # times as long as alone, on a machine with other work
_NICENESS = 5  # answers that run already come first
_RUN = """import json, runpy, sys
sys.path[:] = json.loads(sys.argv[1])
runpy.run_path(sys.argv[2], run_name="__main__")"""


class EncodingProcess:
    """Encodes with one tokenizer, given as the text of a tokenizer.json. Its process starts with the first text.

    Thread-safe: one call waits for another.
    """

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._number = 0

    def encode(self, texts: Sequence[str], *, special: bool, seconds: float) -> tuple[list[list[int]], float]:
        """Return the ids of each text, and the seconds that took; `special` adds special tokens such as BOS.

        Raises TimeoutError after so many `seconds` of computing, and ValueError when the tokenizer fails.
        """
        request = {"texts": list(texts), "special": special, "seconds": seconds}
        answer: dict[str, Any] = {"ended": -signal.SIGKILL}
        with self._lock:
            for _ in range(2):  # somebody may have killed it, or the fork that waited for a text
                try:
                    answer = self._ask(self._running(), request)
                except BrokenPipeError:
                    self._end()
                if answer.get("ended") != -signal.SIGKILL:
                    break
        code = answer.get("ended")
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            raise TimeoutError
        if code is not None:
            limit = f"in at most {_MEMORY >> 20} MiB of memory"
            raise ValueError(f"the process that encodes it, {limit}, was ended by signal {-code}")
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["ids"], answer["seconds"]

    def close(self) -> None:
        """End the process, after the texts that it encodes now. Further ones start it again."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            self._end()
            self._child = subprocess.Popen(
                (python(), "-c", _RUN, json.dumps([place for place in sys.path if place.startswith("/")]), __file__),
                cwd="/",  # Python imports modules from the working directory
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us
            )
            self._ask(self._child, {"tokenizer": self._tokenizer})
        return self._child

    def _ask(self, child: subprocess.Popen[bytes], request: dict[str, Any]) -> dict[str, Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        self._number += 1
        child.stdin.write(json.dumps({**request, "number": self._number}).encode() + b"\n")
        child.stdin.flush()
        while (line := child.stdout.readline()).endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            # A fork that is killed before it reads a request ends it, and the next one answers it all the same.
            if answer.get("number", self._number) == self._number:
                return answer
        raise BrokenPipeError

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()


class Allowance:
    """Encodes for one request, which may take so many `seconds` of computing altogether."""

    def __init__(self, process: EncodingProcess, seconds: float) -> None:
        self._process = process
        self._seconds = self._left = seconds

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the ids of each text. Raises TimeoutError and ValueError as `EncodingProcess.encode` does."""
        try:
            ids, seconds = self._process.encode(texts, special=special, seconds=max(self._left, _LEAST))
        except TimeoutError:
            self._left = 0.0
        else:
            self._left -= seconds
            if self._left > 0:
                return ids
        raise TimeoutError(f"it takes more than {self._seconds:.2g} s")


def python() -> str:
    """Return the interpreter: `sys.executable` names another program where Python is embedded, as in Triton's stub."""
    running = Path(sys.executable or "")
    if running.name.startswith("python"):
        return str(running)
    return str(Path(sys.prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")


def main() -> None:
    """Answer requests from stdin until it ends: first the tokenizer, then texts."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would be missing in forks
    os.nice(_NICENESS)
    for timer in (signal.SIGPROF, signal.SIGALRM):  # end the process, whatever it does
        signal.signal(timer, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = _plain(json.loads(sys.stdin.buffer.readline())["tokenizer"])
    _write({})
    while child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:  # the input has ended
            return
        _write({"ended": code})
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY,) * 2)
    for line in sys.stdin.buffer:
        _write(_answer(tokenizer, **json.loads(line)))


def _plain(text: str) -> Any:
    """Return the tokenizer without what its file may say about cutting and filling up."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _answer(tokenizer: Any, number: int, texts: list[str], special: bool, seconds: float) -> dict[str, Any]:
    began = time.process_time()
    _set_timers(seconds)
    try:
        ids = [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]
        return {"number": number, "ids": ids, "seconds": time.process_time() - began}
    except BaseException as error:  # noqa: BLE001 - a panic of the tokenizer is one
        return {"number": number, "error": str(error)[:1000] or type(error).__name__}
    finally:
        _set_timers(0)


def _set_timers(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * _SLOWEST)


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

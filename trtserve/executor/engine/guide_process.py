"""The process that tries guides before the engine compiles them, with bounds on time and memory that the kernel keeps.

A guide is a program by an unknown client: a few bytes can cost llguidance minutes and gigabytes, and deep nesting can
end a process. So each is compiled in a fork that has read the tokenizer already and may be killed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.executor.engine.guide_grammar import compiled, grammar_of, sentence, tokenizer_of, try_first_token
from trtserve.executor.engine.requests import GuideType

if TYPE_CHECKING:
    from llguidance import LLTokenizer

GUIDE_SECONDS = 2.0
"""Seconds of CPU time in which a guide must be compiled."""
GUIDE_MEMORY = 256 << 20
"""Bytes of memory that compiling a guide may need."""
KEPT_MEMORY = 64 << 20
"""Bytes of memory that a compiled guide may keep."""

_WAITED = 10  # times GUIDE_SECONDS, where other processes have the CPU
_STACK = 2 << 20  # less than any thread of the engine that uses guides has
_NICENESS = 5  # requests that run already come first


def main() -> None:
    """Answer requests from stdin until it ends: first the tokenizer, then guides."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would be missing in forks
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: LLTokenizer | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "tokenizer" in request:
            tokenizer = tokenizer_of(**request["tokenizer"])
            answer: dict[str, Any] = {}
        else:
            assert tokenizer is not None
            answer = _try_in_fork(tokenizer, GuideType[request["kind"]], request["guide"])
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _try_in_fork(tokenizer: LLTokenizer, kind: GuideType, guide: str) -> dict[str, Any]:
    """Return `grammar` and `bytes` of a guide within the bounds; else `invalid` or `excess` (a reason), or `died`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _bound()
            answer = json.dumps(try_guide(tokenizer, kind, guide)).encode()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(answer)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        given = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == -signal.SIGPROF:
        return {"excess": f"more than {GUIDE_SECONDS:g} s of CPU time"}
    if code == -signal.SIGABRT or (code == 0 and not given):
        return {"excess": f"more than {GUIDE_MEMORY >> 20} MiB of memory"}
    if code == -signal.SIGSEGV:
        return {"excess": f"more than {_STACK >> 20} MiB of stack; it is nested too deeply"}
    if code:
        return {"died": code}
    answered: dict[str, Any] = json.loads(given)
    return answered


def _bound() -> None:
    """Let this process end when it exceeds the bounds from now on."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it does
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, GUIDE_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, GUIDE_SECONDS * _WAITED)
    resource.setrlimit(resource.RLIMIT_AS, (_memory()[0] + GUIDE_MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def try_guide(tokenizer: LLTokenizer, kind: GuideType, guide: str) -> dict[str, Any]:
    """Return `grammar` and `bytes` of a guide; else `invalid` or `excess`."""
    _, resident = _memory()
    try:
        grammar = grammar_of(kind, guide)
        matcher = compiled(tokenizer, grammar)
        try_first_token(matcher)
    except MemoryError:
        return {"excess": f"more than {GUIDE_MEMORY >> 20} MiB of memory"}
    except BaseException as error:  # noqa: BLE001 - a panic of llguidance is one
        return {"invalid": sentence(str(error) or type(error).__name__)}
    kept = max(0, _memory()[1] - resident)
    if kept > KEPT_MEMORY:
        return {"excess": f"{kept >> 20} MiB of memory for as long as it is used, of {KEPT_MEMORY >> 20} MiB allowed"}
    return {"grammar": grammar, "bytes": kept}


def _memory() -> tuple[int, int]:
    """Return the bytes of address space and of memory that this process has."""
    total, resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
    return int(total) * resource.getpagesize(), int(resident) * resource.getpagesize()


if __name__ == "__main__":
    main()

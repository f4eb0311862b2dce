"""The process that encodes the texts of clients, with bounds on time and memory that the kernel keeps.

A tokenizer is data by an unknown author: its normalizer may multiply a text, and its expressions may take hours.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_NICENESS = 5  # answers that run already come first


def main(memory: int) -> None:
    """Answer requests from stdin until it ends: first the tokenizer, then texts, in `memory` more bytes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.nice(_NICENESS)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it does
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer: Tokenizer | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if tokenizer is None:
            tokenizer = _plain(request["tokenizer"])
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
            answer: dict[str, Any] = {}
        else:
            answer = _answer(tokenizer, **request)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


def _plain(text: str) -> Tokenizer:
    """Return the tokenizer without what its file may say about cutting and filling up."""
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _answer(tokenizer: Tokenizer, texts: list[str], special: bool, seconds: float) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return {"ids": [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]}
    except BaseException as error:  # noqa: BLE001 - a panic of the tokenizer is one
        return {"error": str(error)[:1000] or type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))

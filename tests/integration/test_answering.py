"""Child processes that answer one line to each request."""

from __future__ import annotations

import signal
import sys

import pytest

from trtserve.process.answering import AnsweringProcess

# Interrupts whoever waits for an answer, and gives it when the next request is there.
_ANSWERS = """
import json, os, signal, sys
for line in sys.stdin:
    further = ""
    if json.loads(line)["interrupt"]:
        os.kill(os.getppid(), signal.SIGINT)
        further = sys.stdin.readline()
    print(line + further, end="", flush=True)
"""


def test_an_answer_that_nobody_waited_for_is_not_that_of_the_next_request() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = AnsweringProcess((sys.executable, "-c", _ANSWERS))
    try:
        with pytest.raises(KeyboardInterrupt):
            process.ask({"interrupt": True})
        for number in range(3):
            request = {"interrupt": False, "number": number}
            assert process.ask(request) == request
    finally:
        process.close()
        signal.signal(signal.SIGINT, before)

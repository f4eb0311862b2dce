"""What a model's threads do again and again: one round that fails is not the last."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

from tests.support.model_modules import load


def test_a_round_that_fails_is_told_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    backend = SimpleNamespace(Logger=SimpleNamespace(log_error=told.append))
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    periodic = load(monkeypatch, "tensorrt_llm_bls", "periodic")
    stopping = threading.Event()
    rounds: list[int] = []

    def look() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            raise LookupError("no such request")
        stopping.set()

    periodic.repeat(stopping, 0.001, look)
    assert rounds == [0, 1]
    assert told == ["look failed with LookupError: no such request"]

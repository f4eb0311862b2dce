"""What a model's threads do again and again: one round that fails is not the last."""

from __future__ import annotations

import threading

import pytest
import triton_python_backend_utils as pb_utils

from trtserve.programs.shared.senders import repeat


def test_a_round_that_fails_is_told_and_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(pb_utils.Logger, "log_error", told.append)
    stopping = threading.Event()
    rounds: list[int] = []

    def look() -> None:
        rounds.append(len(rounds))
        if len(rounds) == 1:
            raise LookupError("no such request")
        stopping.set()

    repeat(stopping, 0.001, look)
    assert rounds == [0, 1]
    assert told == ["look failed with LookupError: no such request"]

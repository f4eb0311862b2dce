"""A server that stands still while it loads is told from one that works."""

from __future__ import annotations

import pytest

from trtserve.process import ProcessId
from trtserve.server import readiness
from trtserve.server.readiness import Standstill

STUBS = [ProcessId(pid=11, started=0.0), ProcessId(pid=12, started=0.0)]


class Clock:
    """The time, and the CPU time of each process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.used = 0.0
        monkeypatch.setattr("trtserve.server.readiness.time.monotonic", lambda: self.now)
        monkeypatch.setattr(readiness, "_cpu_seconds", lambda _: self.used)


def seconds_until_it_lasts(clock: Clock, stubs: list[ProcessId], *, work: float, most: int = 200) -> float | None:
    """Look once a second at stubs that each use `work` seconds of CPU time in it."""
    looker = Standstill()
    for _ in range(most):
        if looker.lasts(stubs):
            return clock.now
        clock.now += 1
        clock.used += work
    return None


@pytest.mark.parametrize(("work", "expected"), [(0.0, 61), (0.001, 61), (0.02, None), (1.0, None)])
def test_a_minute_without_work(work: float, expected: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_until_it_lasts(Clock(monkeypatch), STUBS, work=work) == expected


def test_nothing_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_until_it_lasts(Clock(monkeypatch), [], work=0) is None


def test_another_stub_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looker = Clock(monkeypatch), Standstill()
    looker.lasts(STUBS[:1])
    clock.now = 61
    assert not looker.lasts(STUBS)
    assert not looker.lasts(STUBS)

"""Waiting for a server: other programs on its port, ranks that are missing, and a Triton that waits for ever."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtserve.errors import ServerStartError
from trtserve.process import ProcessId
from trtserve.server import readiness
from trtserve.server.readiness import Standstill

STUBS = [ProcessId(pid=11, started=0.0), ProcessId(pid=12, started=0.0)]


def _server(log: Path, ranks: int) -> tuple[Any, Any]:
    instance = SimpleNamespace(process=_myself())
    planned = SimpleNamespace(launch=SimpleNamespace(ranks=ranks), log=log)
    return SimpleNamespace(instances=[instance]), SimpleNamespace(instances=[planned])


def _myself() -> ProcessId:
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


def test_a_rank_that_is_gone_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text("[1,1]<stderr>:out of memory\n")
    monkeypatch.setattr(readiness, "rank_processes", lambda _: {0: _myself(), 2: _myself()})
    monkeypatch.setattr(readiness, "_JOB_END", 0.0)
    with pytest.raises(ServerStartError, match="Rank 1 of 3 ended while the server became ready") as caught:
        readiness.require_ranks(*_server(tmp_path / "log", 3))
    assert "out of memory" in caught.value.message


@pytest.mark.parametrize(("ranks", "found"), [(1, 0), (3, 0), (2, 2)], ids=["one", "in a container", "all here"])
def test_complete_or_invisible_ranks_are_accepted(
    ranks: int, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").touch()
    monkeypatch.setattr(readiness, "rank_processes", lambda _: {rank: _myself() for rank in range(found)})
    readiness.require_ranks(*_server(tmp_path / "log", ranks))


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

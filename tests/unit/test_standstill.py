"""Processes that live and do nothing: stopped by a signal, without any work, or an executor that makes no step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from trtserve.client.metrics import Heartbeat
from trtserve.gateway import standstill
from trtserve.gateway.standstill import GatewayBeat, Hangs, Standstill, gateway_silence
from trtserve.process import ProcessId, work_done

STUBS = [ProcessId(pid=11, started=0.0), ProcessId(pid=12, started=0.0)]
ROOT = ProcessId(pid=10, started=0.0)


class Clock:
    """The time, and the work that each process has done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.used = 0.0
        monkeypatch.setattr("trtserve.gateway.standstill.time.monotonic", lambda: self.now)
        monkeypatch.setattr(standstill, "work_done", lambda _: self.used)
        monkeypatch.setattr(standstill, "python_stubs", lambda _: dict.fromkeys(STUBS, "tensorrt_llm"))
        monkeypatch.setattr(standstill, "tree", lambda _: set())


def test_work_is_cpu_time() -> None:
    myself = ProcessId.of(os.getpid())
    assert myself is not None
    before, end = work_done(myself), time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert before + 0.05 < work_done(myself) < before + 100
    assert work_done(ProcessId(pid=myself.pid, started=0.0)) == 0


def seconds_until_it_lasts(clock: Clock, stubs: list[ProcessId], *, work: float, most: int = 200) -> float | None:
    """Look once a second at stubs that each use `work` seconds of CPU time in it."""
    looker = Standstill(60, 1)
    for _ in range(most):
        if looker.lasts(stubs):
            return clock.now
        clock.now += 1
        clock.used += work
    return None


@pytest.mark.parametrize(("work", "expected"), [(0.0, 61), (0.001, 61), (0.02, None), (1.0, None)])
def test_a_minute_without_work(work: float, expected: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_until_it_lasts(Clock(monkeypatch), STUBS, work=work) == expected


def test_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_until_it_lasts(Clock(monkeypatch), [], work=0) is None


def test_another_process_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looker = Clock(monkeypatch), Standstill(60, 1)
    looker.lasts(STUBS[:1])
    clock.now = 61
    assert not looker.lasts(STUBS)
    assert not looker.lasts(STUBS)


def beat(pid: int, time: float, moved: float) -> Heartbeat:
    return Heartbeat(model="tensorrt_llm", pid=pid, time=time, moved=moved, open_requests=3, failure=None)


@pytest.mark.parametrize(
    ("steps", "beats", "work", "hangs"),
    [
        pytest.param(0, 1, 0.0, True, id="waits for ever"),
        pytest.param(0, 1, 0.02, True, id="waits, with the threads of its model"),
        pytest.param(0, 0, 0.0, True, id="shows nothing"),
        pytest.param(0, 1, 0.5, False, id="a long step"),
        pytest.param(0, 0, 0.5, False, id="holds the interpreter for long"),
        pytest.param(1, 1, 0.0, False, id="makes steps"),
    ],
)
def test_an_executor_hangs_when_it_neither_steps_nor_works(
    steps: int, beats: int, work: float, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, looker, found = Clock(monkeypatch), Hangs(2), {}
    for half in range(60):
        clock.now, clock.used = half / 2, half / 2 * work
        if found := dict(looker.among([beat(11, clock.now * beats, clock.now * steps)], ROOT)):
            # What the executor itself shows is found at once; it may be a disk that keeps it from showing anything.
            assert clock.now == (3.5 if beats else 8.0)
            break
    assert bool(found) == hangs
    assert not hangs or found["tensorrt_llm"].startswith("hangs: no step and no work for ")


def test_executors_of_other_instances_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looker = Clock(monkeypatch), Hangs(15)
    for clock.now in range(60):
        assert looker.among([beat(99, 0, 0)], ROOT) == {}


def test_a_gateway_shows_that_it_lives(tmp_path: Path) -> None:
    assert gateway_silence(tmp_path, os.getpid()) is None
    GatewayBeat(tmp_path).beat()
    silence = gateway_silence(tmp_path, os.getpid())
    assert silence is not None
    assert -0.001 <= silence < 60  # the file has milliseconds
    (path,) = tmp_path.iterdir()
    path.write_text(f"{time.monotonic() - 100:24.3f}")
    silence = gateway_silence(tmp_path, os.getpid())
    assert silence is not None
    assert silence > 99
    path.write_text("")
    assert gateway_silence(tmp_path, os.getpid()) is None
    GatewayBeat(tmp_path / "absent").beat()

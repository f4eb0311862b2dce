"""Waiting for a server: other programs on its port, ranks that are missing, and a Triton that waits for ever."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtserve.errors import ServerStartError
from trtserve.process import ProcessId
from trtserve.server import start


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
    monkeypatch.setattr(start, "rank_processes", lambda _: {0: _myself(), 2: _myself()})
    monkeypatch.setattr(start, "_JOB_END", 0.0)
    with pytest.raises(ServerStartError, match="Rank 1 of 3 ended while the server became ready") as caught:
        start.require_ranks(*_server(tmp_path / "log", 3))
    assert "out of memory" in caught.value.message


@pytest.mark.parametrize(("ranks", "found"), [(1, 0), (3, 0), (2, 2)], ids=["one", "in a container", "all here"])
def test_complete_or_invisible_ranks_are_accepted(
    ranks: int, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").touch()
    monkeypatch.setattr(start, "rank_processes", lambda _: {rank: _myself() for rank in range(found)})
    start.require_ranks(*_server(tmp_path / "log", ranks))


LOADING = (
    'I1126 10:00:00.000000 1 model_lifecycle.cc:472] "loading: {model}:1"\n'
    'I1126 10:00:00.000000 1 python_be.cc:1912] "TRITONBACKEND_ModelInstanceInitialize: {model}_0_0 (CPU device 0)"\n'
)
LOADED = "I1126 10:00:01.000000 1 model_lifecycle.cc:839] \"successfully loaded '{model}'\"\n"


@pytest.mark.parametrize(
    ("missed", "busy", "ends"),
    [
        pytest.param({0: "preprocessing"}, None, True, id="a model of rank 0"),
        pytest.param({1: "tensorrt_llm"}, None, True, id="the core model of rank 1 alone"),
        pytest.param({0: "tensorrt_llm", 1: "tensorrt_llm"}, 1, False, id="rank 0 waits for rank 1, which works"),
        pytest.param({0: "foreign"}, None, False, id="a model that is not ours"),
        pytest.param({}, None, False, id="all have loaded"),
    ],
)
def test_a_triton_among_ranks_that_has_missed_its_stub_is_started_again(
    missed: dict[int, str], busy: int | None, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {0: ("tensorrt_llm", "preprocessing", "foreign"), 1: ("tensorrt_llm",)}
    lines = [
        f"[1,{rank}]<stderr>:{line}\n"
        for rank, loading in models.items()
        for model in loading
        for text in (LOADING, "" if missed.get(rank) == model else LOADED)
        for line in text.format(model=model).splitlines()
    ]
    (tmp_path / "log").write_text("".join(lines))
    servers = {rank: ProcessId(pid=10 + rank, started=0.0) for rank in models}
    stubs = {
        servers[rank]: {ProcessId(pid=100 * rank + n, started=0.0): model for n, model in enumerate(loading, 1)}
        for rank, loading in models.items()
    }
    now = 0.0
    monkeypatch.setattr(start, "rank_processes", lambda _: servers)
    monkeypatch.setattr(start, "python_stubs", stubs.__getitem__)
    monkeypatch.setattr(start, "tree", lambda _: set())
    monkeypatch.setattr(start, "came_up", lambda *_, **__: False)
    monkeypatch.setattr("trtserve.process.halts.Halts.lasting", lambda *_: [])
    monkeypatch.setattr(ProcessId, "alive", lambda _: True)
    monkeypatch.setattr("trtserve.gateway.standstill.work_done", lambda stub: now if stub.pid // 100 == busy else 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    _, plan = _server(tmp_path / "log", 2)
    planned = plan.instances[0]
    planned.container, planned.address, planned.launch.mode = None, None, "leader"
    waiting = start._Waiting(_myself(), planned, frozenset({"tensorrt_llm", "preprocessing"}))
    error = None
    while error is None and now < 200:
        now += 1.5
        try:
            assert not waiting.ready()
        except ServerStartError as caught:
            error = caught
    assert (error is not None) == ends
    if error is not None:
        assert error.by_chance
        assert 60 < now < 70
        assert f"the Python stub of {next(iter(missed.values()))}, which has nothing left to do" in error.message

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

"""What an executor shows of itself, and what a supervisor makes of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trtserve.client.metrics import read_heartbeats
from trtserve.programs.shared.run_folder import DRAINING, VARIABLE, Heartbeat, require_not_draining


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    """Change fields of the only record; numbers are added."""
    (path,) = folder.glob("*.heartbeat")
    record = json.loads(path.read_text())
    record |= {key: record[key] + value if isinstance(value, float) else value for key, value in fields.items()}
    path.write_text(json.dumps(record))


def test_a_working_executor_has_no_ailment(folder: Path) -> None:
    heart = Heartbeat("tensorrt_llm")
    heart.beat(open_requests=3, progress=7, failure=None)
    (found,) = read_heartbeats(folder)
    assert (found.model, found.pid, found.open_requests, found.ailment) == ("tensorrt_llm", os.getpid(), 3, "")
    heart.close()
    assert read_heartbeats(folder) == []


def test_a_failed_executor(folder: Path) -> None:
    Heartbeat("tensorrt_llm").beat(open_requests=0, progress=0, failure="x" * 5000)
    (found,) = read_heartbeats(folder)
    assert found.failure == "x" * 500
    assert found.ailment.startswith("its executor has stopped working: xxx")


def test_a_process_that_does_nothing_any_more(folder: Path) -> None:
    Heartbeat("tensorrt_llm").beat(open_requests=0, progress=0, failure=None)
    change(folder, time=-100.0)
    assert "no sign of life for 100 s" in read_heartbeats(folder)[0].ailment


def test_an_executor_that_makes_no_step(folder: Path) -> None:
    heart = Heartbeat("tensorrt_llm")
    heart.beat(open_requests=0, progress=5, failure=None)
    heart._moved -= 100
    heart.beat(open_requests=2, progress=5, failure=None)
    assert "no step for 100 s, with 2 open requests" in read_heartbeats(folder)[0].ailment
    heart.beat(open_requests=2, progress=6, failure=None)
    assert read_heartbeats(folder)[0].ailment == ""


def test_a_shorter_record_replaces_a_longer_one(folder: Path) -> None:
    heart = Heartbeat("tensorrt_llm")
    heart.beat(open_requests=10**9, progress=0, failure="a long text " * 20)
    heart.beat(open_requests=0, progress=0, failure=None)
    assert read_heartbeats(folder)[0].failure is None


def test_unreadable_records_are_left_out(folder: Path) -> None:
    (folder / "a-1.heartbeat").write_text("")
    assert read_heartbeats(folder) == []
    assert read_heartbeats(folder / "absent") == []


def test_without_a_supervisor_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    heart = Heartbeat("tensorrt_llm")
    heart.beat(open_requests=0, progress=0, failure=None)
    heart.close()
    require_not_draining()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "removed"))
    Heartbeat("tensorrt_llm").beat(open_requests=0, progress=0, failure=None)
    require_not_draining()
    assert list(tmp_path.iterdir()) == []


def test_a_draining_server_takes_no_new_requests(folder: Path) -> None:
    require_not_draining()
    (folder / DRAINING).touch()
    with pytest.raises(ValueError, match="takes no new ones"):
        require_not_draining()

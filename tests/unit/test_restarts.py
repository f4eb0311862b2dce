"""When a server that failed is started again, and its logs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from trtserve.errors import PortInUseError, ServerDiedError, ServerStartError
from trtserve.server import supervision
from trtserve.server.supervision import _Restarts
from trtserve.server.triton import server_log
from trtserve.server.triton.server_log import limit_size, rotate
from trtserve.specs import ServerSpec

DIED = ServerDiedError("it died")


@pytest.mark.parametrize(
    ("policy", "limit", "delays"),
    [
        ("never", 3, [None]),
        ("on-failure", 3, [1, 2, 4, None]),
        ("always", 1, [1, 2, 4, 8, 16, 32, 60, 60]),
    ],
)
def test_delays_grow_until_the_limit(policy: Any, limit: int, delays: list[float | None]) -> None:
    restarts = _Restarts(ServerSpec(restart=policy, restart_limit=limit))
    restarts.became_ready()
    errors = itertools.cycle((DIED, ServerStartError("x"), PortInUseError("x")))
    assert [restarts.delay(next(errors)) for _ in delays] == delays
    assert restarts.count == sum(delay is not None for delay in delays)


def test_a_long_service_begins_a_new_row(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts = _Restarts(ServerSpec(restart="on-failure", restart_limit=1))
    restarts.became_ready()
    assert restarts.delay(DIED) == 1
    monkeypatch.setattr(supervision, "_STABLE", 0.0)
    restarts.became_ready()
    assert restarts.delay(DIED) == 1


def test_a_first_start_is_repeated_only_when_it_was_killed() -> None:
    error = ServerStartError("no such file")
    assert _Restarts(ServerSpec(restart="on-failure")).delay(error) is None
    error.killed = True
    assert _Restarts(ServerSpec(restart="on-failure")).delay(error) == 1


@pytest.mark.parametrize(("policy", "delay"), [("on-failure", None), ("always", 1)])
def test_a_server_that_ends_with_code_0(policy: Any, delay: float | None) -> None:
    restarts = _Restarts(ServerSpec(restart=policy))
    restarts.became_ready()
    restarts.exit_code = 0
    assert restarts.delay(DIED) == delay


def test_a_start_keeps_the_logs_of_earlier_ones(tmp_path: Path) -> None:
    log = tmp_path / "demo.log"
    rotate(log)
    for text in "abcde":
        log.write_text(text)
        rotate(log)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "demo.log.1": "e",
        "demo.log.2": "d",
        "demo.log.3": "c",
    }


def test_a_log_that_is_written_is_emptied_when_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "_LARGEST", 10)
    log = tmp_path / "demo.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"0123456789")
        limit_size(log)
        assert log.stat().st_size == 10
        writer.write(b"more")
        limit_size(log)
        writer.write(b"new")
        assert log.read_bytes() == b"new"
    assert (tmp_path / "demo.log.1").read_bytes() == b"0123456789more"

"""State files: believed only for the process that they were written for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trtserve.errors import ServerAmbiguousError, ServerNotFoundError
from trtserve.process import Identity
from trtserve.servers import (
    Server,
    condition,
    find_server,
    list_servers,
    log_file,
    recorded_servers,
    state_file,
    write_state,
)
from trtserve.start import stop_server
from trtserve.store import NameRecord, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def server(store: Store, name: str, *, age: float = 0.0, **more: object) -> Server:
    """A server whose process is this test, or with an `age` an earlier one with its pid."""
    own = Identity.of(os.getpid())
    assert own is not None
    made = Server(
        name=name,
        host="127.0.0.1",
        http_port=1,
        grpc_port=2,
        metrics_port=3,
        pid=own.pid,
        started=own.started - age,
        log=log_file(name, store),
        repository=Path("/repository"),
        model=name,
        streaming=True,
        phase="running",
        shm_prefix="",
    )
    made = replace(made, **more)  # type: ignore[arg-type]
    write_state(made, store)
    return made


def test_state_survives_the_file(store: Store) -> None:
    written = server(store, "demo-1.5", stubs=((5, 1.5), (6, 2.5)))
    assert list_servers(store) == [written]


def test_a_reused_pid_is_not_the_server(store: Store) -> None:
    stale = server(store, "demo", age=60)
    assert list_servers(store) == []
    assert recorded_servers(store) == [stale]
    assert condition(stale)[0] == "failed"


def test_the_only_server_is_implied(store: Store) -> None:
    server(store, "dead", age=60)
    living = server(store, "living")
    assert find_server(store=store) == living
    assert find_server("living", store=store) == living


def test_several_servers_are_listed(store: Store) -> None:
    server(store, "one")
    server(store, "two")
    with pytest.raises(ServerAmbiguousError, match="2 servers are running: one, two") as caught:
        find_server(store=store)
    assert "--server NAME" in str(caught.value.hint)
    with pytest.raises(ServerAmbiguousError) as caught:
        stop_server(store=store)
    assert caught.value.hint == "Name one: `trtserve stop NAME`, or stop them all: `trtserve stop --all`."


def test_without_a_server_it_is_said_how_to_start_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerNotFoundError) as caught:
        find_server(store=store)
    assert caught.value.hint is not None
    assert "trtserve import demo" in caught.value.hint
    names = ("source", "model", "checkpoint", "engine", "repository", "imported")
    paths: dict[str, Any] = dict.fromkeys(names, "x")
    store.record(NameRecord(name="demo", **paths))
    with pytest.raises(ServerNotFoundError) as caught:
        find_server(store=store)
    store_said = f" (only the store of $TRTSERVE_HOME was looked into: {os.environ['TRTSERVE_HOME']})"
    assert caught.value.hint == f"Start one: trtserve start --detach{store_said}"
    monkeypatch.delenv("TRTSERVE_HOME")
    with pytest.raises(ServerNotFoundError) as caught:
        find_server(store=store)
    assert caught.value.hint == "Start one: trtserve start --detach"


def test_an_unknown_name_lists_the_known(store: Store) -> None:
    server(store, "demo")
    with pytest.raises(ServerNotFoundError, match="No server other is running; running: demo"):
        find_server("other", store=store)


def test_a_dead_server_is_explained_once_and_forgotten(store: Store) -> None:
    dead = server(store, "demo", age=60)
    dead.log.write_text('I1120 12:17:16.1 1 main.cc:1] "the last line"\n')
    with pytest.raises(ServerNotFoundError, match="ended without being stopped") as caught:
        find_server("demo", store=store)
    assert "the last line" in caught.value.message
    assert caught.value.log == dead.log
    assert dead.log.exists()
    assert not state_file("demo", store).exists()
    with pytest.raises(ServerNotFoundError, match="No server demo is running, nor any other"):
        find_server("demo", store=store)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "x"}', "nonsense"])
def test_a_state_file_of_another_version_is_no_server(store: Store, content: str) -> None:
    store.servers.mkdir(parents=True)
    state_file("x", store).write_text(content)
    assert recorded_servers(store) == []


def test_a_dead_stub_is_a_failure(store: Store) -> None:
    own = Identity.of(os.getpid())
    assert own is not None
    limping = server(store, "demo", stubs=((own.pid, own.started), (own.pid, own.started - 60)))
    assert condition(limping) == ("failed", "1 of 2 Python stubs have ended; requests to their models fail")


def test_a_server_that_does_not_answer_yet_is_starting(store: Store) -> None:
    assert condition(server(store, "demo", phase="starting")) == ("starting", "")

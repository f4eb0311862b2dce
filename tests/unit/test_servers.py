"""State files: believed only for the process that they were written for."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_records import proxy_record, server_record
from tests.support.waiting import wait_until
from trtserve.cli import run
from trtserve.errors import ServerAmbiguousError, ServerDiedError, ServerNotFoundError
from trtserve.files import locked
from trtserve.process import ProcessId
from trtserve.server import shutdown
from trtserve.server.discovery import find_log, find_server
from trtserve.server.shutdown import end_server, stop_server
from trtserve.server.state import (
    GatewayState,
    Server,
    State,
    Stub,
    change_state,
    failure_of,
    is_stopping,
    last_record,
    launch_lock,
    list_servers,
    log_file,
    ready_now,
    recorded_server,
    recorded_servers,
    run_folder,
    state_file,
    write_state,
)
from trtserve.server.status import server_state, server_status
from trtserve.server.triton.server_log import rotate
from trtserve.store import NameRecord, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def server(store: Store, name: str, *, age: float = 0.0, **more: Any) -> Server:
    """A server whose process is this test, or with an `age` an earlier one with its pid."""
    made = server_record(name, store=store, age=age, **more)
    write_state(made, store)
    return made


def test_state_survives_the_file(store: Store) -> None:
    written = server(store, "demo-1.5", stubs=(Stub(pid=5, started=1.5, model="a"), Stub(pid=6, started=2.5)))
    assert list_servers(store) == [written]


def test_a_state_file_of_the_time_of_the_door_is_read(store: Store) -> None:
    written = server(store, "demo")
    gateway = GatewayState(process=written.instances[0].process, log=Path("/log"), settings=Path("/1.json"))
    written = replace(written, instances=(replace(written.instances[0], gateway=gateway),))
    write_state(written, store)
    file = state_file("demo", store)
    file.write_text(file.read_text(encoding="utf-8").replace('"gateway"', '"door"'), encoding="utf-8")
    assert recorded_server("demo", store) == written


@pytest.mark.parametrize("own_gateway", [True, False])
def test_a_state_file_of_the_time_of_nginx_keeps_its_process_for_stop(store: Store, own_gateway: bool) -> None:
    written = server(store, "demo")
    nginx, process = ProcessId(pid=77, started=5.0), written.instances[0].process
    if own_gateway:
        gateway = GatewayState(process=process, log=Path("/log"), settings=Path("/1.json"), encrypted=True)
        written = replace(written, instances=(replace(written.instances[0], gateway=gateway),))
        write_state(written, store)
    file = state_file("demo", store)
    content = json.loads(file.read_text(encoding="utf-8"))
    proxy = {"file": "/x/nginx.conf", "log": "/x/nginx.log", "http_port": 8080, "grpc_port": 8081}
    content["proxy"] = {**proxy, "process": {"pid": 77, "started": 5.0}}
    file.write_text(json.dumps(content), encoding="utf-8")
    found = recorded_server("demo", store)
    assert found is not None
    assert found.roots[0] == nginx  # what `stop` ends
    assert (found.endpoint.http_port, found.endpoint.grpc_port) == (8080, 8081)
    assert found.gateway is not None
    assert found.gateway.encrypted == own_gateway
    assert found.gateway.settings == (Path("/1.json") if own_gateway else Path("/x"))
    content["proxy"] = {**proxy, "process": None}  # nginx was not installed
    file.write_text(json.dumps(content), encoding="utf-8")
    assert recorded_server("demo", store) == written


def test_a_reused_pid_is_not_the_server(store: Store) -> None:
    stale = server(store, "demo", age=60)
    assert list_servers(store) == []
    assert recorded_servers(store) == [stale]
    assert server_state(stale)[0] == "failed"


def test_the_only_server_is_implied(store: Store) -> None:
    server(store, "dead", age=60)
    living = server(store, "living")
    assert find_server(store=store) == living
    assert find_server("living", store=store) == living


def test_status_warns_of_a_supervisor_that_is_stopped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(store.root))
    own = server_record("demo", store=store)
    write_state(replace(own, supervisor=own.instances[0].process), store)
    assert not server_status("demo", store=store)[0].warnings
    monkeypatch.setattr(ProcessId, "halted", lambda self: True)
    (warning,) = server_status("demo", store=store)[0].warnings
    assert "its supervisor" in warning
    assert f"kill -CONT {os.getpid()}" in warning


def test_several_servers_are_listed(store: Store) -> None:
    server(store, "one")
    server(store, "two")
    with pytest.raises(ServerAmbiguousError, match="2 servers are running: one, two") as caught:
        find_server(store=store)
    assert "--server NAME" in str(caught.value.hint)
    with pytest.raises(ServerAmbiguousError) as caught:
        stop_server(store=store)
    assert caught.value.hint == "Name one: `trtserve stop NAME`, or stop them all: `trtserve stop --all`."


def test_without_a_server_the_hint_starts_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerNotFoundError) as caught:
        find_server(store=store)
    assert caught.value.hint is not None
    assert "trtserve import demo" in caught.value.hint
    names = ("source", "model", "checkpoint", "engine", "repository", "imported")
    paths: dict[str, Any] = dict.fromkeys(names, "x")
    store.record(NameRecord(name="demo", **paths))
    with pytest.raises(ServerNotFoundError) as caught:
        find_server(store=store)
    store_said = f" (only the store of $TRTSERVE_HOME was searched: {os.environ['TRTSERVE_HOME']})"
    assert caught.value.hint == f"Start one: trtserve start --detach{store_said}"
    monkeypatch.delenv("TRTSERVE_HOME")
    with pytest.raises(ServerNotFoundError) as caught:
        find_server(store=store)
    assert caught.value.hint == "Start one: trtserve start --detach"


@pytest.mark.parametrize("name", ["../x", "..", "", "x\n", "\udcff", "x" * 300])
def test_a_name_that_leads_elsewhere_is_no_server(name: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(store.root))
    server(store, "demo")
    asks: list[Callable[[], object]] = [
        lambda: find_server(name, store=store),
        lambda: server_status(name, store=store),
        lambda: stop_server(name, store=store),
        lambda: find_log(name),
    ]
    for ask in asks:
        with pytest.raises(ServerNotFoundError, match=rf"No server {re.escape(name)} is running; running: demo"):
            ask()


def test_the_last_log_is_that_of_the_last_start_though_the_clock_was_set_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTSERVE_HOME", str(store.root))
    store.servers.mkdir(parents=True, exist_ok=True)
    earlier, later = (log_file(name, store) for name in ("earlier", "later"))
    for log, ahead in ((earlier, 3600), (later, 0)):
        rotate(log)
        log.write_text("a line\n", encoding="utf-8")
        written = time.time() + ahead
        os.utime(log, (written, written))
    assert find_log() == later


def test_an_unknown_name_lists_the_known(store: Store) -> None:
    server(store, "demo")
    with pytest.raises(ServerNotFoundError, match="No server other is running; running: demo") as caught:
        find_server("other", store=store)
    assert caught.value.hint == "Name a running server (demo)."
    paths: dict[str, Any] = dict.fromkeys(("source", "model", "checkpoint", "engine", "repository"), "x")
    store.record(NameRecord(name="other", imported="2026-01-01", **paths))
    with pytest.raises(ServerNotFoundError) as caught:
        find_server("other", store=store)
    assert caught.value.hint == "Name a running server (demo), or start it: trtserve start other"


def test_a_dead_server_is_explained_until_it_is_stopped(store: Store) -> None:
    dead = server(store, "demo", age=60)
    dead.instances[0].log.write_text('I1120 12:17:16.1 1 main.cc:1] "the last line"\n')
    with pytest.raises(ServerNotFoundError, match="ended without being stopped") as caught:
        find_server("demo", store=store)
    assert "the last line" in caught.value.message
    assert caught.value.log == dead.instances[0].log
    assert dead.instances[0].log.exists()
    assert [each.state for each in recorded_servers(store)] == ["failed"]
    with pytest.raises(ServerNotFoundError, match=r"demo has failed.*ended without being stopped"):
        find_server("demo", store=store)
    stop_server("demo", store=store)
    assert recorded_servers(store) == []
    with pytest.raises(ServerNotFoundError, match="No server demo is running, nor any other"):
        find_server("demo", store=store)


def test_stop_all_first_stops_what_runs_then_waits_for_what_begins() -> None:
    store = Store()
    server(store, "demo", age=60)
    ended: list[int] = []
    stopping = threading.Thread(target=lambda: ended.append(run(["stop", "--all"])))
    with locked(launch_lock("other", store), shared=True):
        stopping.start()
        wait_until(lambda: recorded_server("demo", store) is None)
        server(store, "other", age=60)
    stopping.join()
    assert (ended, recorded_servers(store)) == ([0], [])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "x"}', "nonsense"])
def test_a_state_file_of_another_version_is_ignored(store: Store, content: str) -> None:
    store.servers.mkdir(parents=True)
    state_file("x", store).write_text(content)
    assert recorded_servers(store) == []


def test_a_dead_stub_is_a_failure(store: Store) -> None:
    own = ProcessId.of(os.getpid())
    assert own is not None
    stubs = (Stub(pid=own.pid, started=own.started, model="a"), Stub(pid=own.pid, started=own.started - 60, model="b"))
    state, reason = server_state(server(store, "demo", stubs=stubs))
    assert (state, reason) == ("failed", "1 of 2 Python stubs have ended (b); requests to them fail")


def test_a_failure_names_the_log_of_what_ended(store: Store) -> None:
    log = log_file("demo@gateway", store)
    error = ServerDiedError("demo: its gateway has ended", log=log)
    write_state(server(store, "demo", state="failed", failure=failure_of(error)), store)
    (status,) = server_status("demo", store=store)
    assert (status.state, status.reason, status.log) == ("failed", error.message, log)


def test_a_server_that_does_not_answer_yet_is_starting(store: Store) -> None:
    assert server_state(server(store, "demo", state="starting")) == ("starting", "")


def test_a_server_that_is_being_stopped_stays_so(store: Store) -> None:
    one = server(store, "demo")
    assert change_state(one, store, state="degraded", reason="slow").state == "degraded"
    assert change_state(one, store, state="draining").reason == "slow"
    assert change_state(one, store, state="ready").state == "draining"
    assert change_state(one, store, state="stopped").state == "stopped"
    assert recorded_server("demo", store) is None
    assert last_record("demo", store) is not None


def test_a_server_whose_state_cannot_be_read_is_not_stopped(store: Store) -> None:
    running = server(store, "demo")
    file, folder = state_file("demo", store), run_folder("demo", store)
    folder.mkdir(parents=True)
    for damage in (lambda: file.write_text("{"), file.unlink):
        damage()
        assert not is_stopping(running, store)
    folder.rmdir()
    assert is_stopping(running, store)  # nothing of it is left
    file.write_text("{")  # between two starts
    assert not is_stopping(running, store)
    states: list[tuple[State, bool]] = [("ready", False), ("draining", True), ("stopped", True), ("failed", False)]
    for state, stopping in states:
        write_state(replace(running, state=state), store)
        assert is_stopping(running, store) == stopping


@pytest.mark.parametrize("jump", [-86_400.0, 0.0, 86_400.0])
def test_a_clock_that_jumps_changes_nothing(jump: float, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are known by their start after the boot, and everything that waits uses the monotonic clock."""
    now = time.time()
    running = server(store, "demo", **ready_now())
    monkeypatch.setattr(time, "time", lambda: now + jump)
    assert list_servers(store) == [running]
    assert running.alive()
    (status,) = server_status("demo", store=store)
    assert status.uptime == pytest.approx(0, abs=60)


def test_the_record_of_a_later_server_is_left_alone(store: Store) -> None:
    earlier = server(store, "demo", shm_prefix="earlier")
    later = server(store, "demo", shm_prefix="later")
    assert change_state(earlier, store, state="failed") == earlier
    assert last_record("demo", store) == later


def test_a_server_between_two_starts_is_alive_through_its_supervisor(store: Store) -> None:
    own = ProcessId.of(os.getpid())
    assert own is not None
    waiting = server(store, "demo", age=60, state="starting", reason="Starting again in 4 s.", supervisor=own)
    assert list_servers(store) == [waiting]
    assert server_state(waiting, store) == ("starting", "Starting again in 4 s.")
    killed = replace(waiting, supervisor=replace(own, started=own.started - 60))
    assert server_state(killed, store)[0] == "failed"


def test_gateways_end_before_triton_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton waits a second for the connections that a gateway keeps open; a second TERM would cut requests off."""
    server = replace(server_record(), proxy=proxy_record(8000))
    (gateway,), triton = [each.process for each in server.gateways], server.instances[0].process
    done: list[tuple[str, list[ProcessId]]] = []

    def stop_triton(roots: Any, prefix: str, *, asked: list[ProcessId], **others: Any) -> None:
        done.append(("asked", asked))

    monkeypatch.setattr(shutdown, "terminate", lambda process: done.append(("TERM", [process])))
    monkeypatch.setattr(shutdown, "wait_gone", lambda members, *others: done.append(("awaited", members)))
    monkeypatch.setattr(shutdown, "stop_triton", stop_triton)
    monkeypatch.setattr(shutdown, "serving_process", lambda root: root)
    monkeypatch.setattr(shutdown, "sweep_session", lambda root: None)
    monkeypatch.setattr(shutdown, "forget", lambda server, store, *, failure: None)
    end_server(server, Store(tmp_path))
    assert done == [("TERM", [gateway]), ("awaited", [gateway]), ("asked", [triton])]
    done.clear()
    entrance = replace(proxy_record(8000).gateway, process=triton)  # one port for many models is its own gateway
    end_server(
        replace(server, proxy=None, instances=(replace(server.instances[0], gateway=entrance),)), Store(tmp_path)
    )
    assert done == [("awaited", []), ("asked", [triton])]

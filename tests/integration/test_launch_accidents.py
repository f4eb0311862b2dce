"""What happens to a launch from outside: its proxy dies, its ports are stolen, it is killed itself."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.doubles import Doubles
from tests.support.launches import (
    assert_gone,
    command,
    repository_of,
    running_rank,
    running_server,
    start_flags,
    started,
)
from tests.support.servers import HOST, free_spec
from tests.support.waiting import eventually
from trtserve.errors import PortInUseError, ServerDiedError
from trtserve.ports import is_free
from trtserve.process import program
from trtserve.progress import SilentProgress
from trtserve.servers import Server, condition, find_server, list_servers
from trtserve.start import life, proxy, serve_foreground, start_server, stop_server
from trtserve.start.proxy import free_pair
from trtserve.store import Store
from trtserve.triton.server import is_ready


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that commands use too."""
    return Store(tmp_path / "home")


def nginx_folder() -> str:
    """Where the real nginx is; skips the test without one, which .ci/run does not allow."""
    found = program("nginx", os.environ["PATH"] + ":/usr/sbin")
    assert found is not None or os.environ.get("TRTSERVE_ORACLE") != "required"
    if found is None:
        pytest.skip("nginx is not installed")
    return str(found.parent)


def proxy_ports() -> int:
    """The first of two neighbouring ports that are free."""
    return free_pair(HOST, random.randrange(20000, 30000), ())


def answers(port: int) -> int:
    """Status of the health page behind a port; 0 when nothing listens there."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/v2/health/ready", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_two_instances_behind_a_proxy(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    nginx_folder()
    repository = repository_of(tmp_path)
    proxy_port = proxy_ports()
    with started(repository, store, instances=2, proxy_port=proxy_port, auto_ports=True) as server:
        assert condition(server) == ("running", "")
        devices = {call.environment["CUDA_VISIBLE_DEVICES"] for call in doubles.calls("tritonserver")}
        assert devices == {"0,1", "2,3"}
        assert len(doubles.calls("tritonserver")) == 4
        (shown,) = json.loads(command("status", "--json").stdout)["result"]
        assert len(shown["server"]["more"]) == 1
        assert f"{proxy_port} → {server.http_port},{server.more[0].http_port}" in command("status").stdout
        # One endpoint for both, which requests go to.
        assert server.proxy is not None
        assert server.endpoint.http_port == proxy_port
        assert [answers(proxy_port) for _ in range(4)] == [200] * 4
        assert not is_free(HOST, proxy_port + 1)
        with pytest.raises(PortInUseError, match="taken by trtserve's server launched"):
            start_server(repository, replace(free_spec("b"), http_port=server.more[0].http_port), store=store)
        with pytest.raises(PortInUseError, match=f"--proxy-port {proxy_port} is taken by trtserve's server launched"):
            start_server(repository, replace(free_spec("b"), instances=2, proxy_port=proxy_port), store=store)
        os.kill(server.more[0].ranks[0][0], signal.SIGKILL)
        assert eventually(lambda: condition(find_server(store=store))[0] == "failed")
    assert answers(proxy_port) == 0
    assert not server.proxy.file.parent.exists()
    assert server.proxy.log.exists()


def test_a_dead_proxy_ends_the_foreground(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    nginx_folder()
    spec = replace(free_spec(), oversubscribe=True, instances=2, proxy_port=proxy_ports(), auto_ports=True)
    seen: list[Server] = []

    def kill_it(server: Server) -> None:
        seen.append(server)
        assert server.proxy is not None
        assert server.proxy.pid is not None
        os.kill(server.proxy.pid, signal.SIGKILL)
        assert eventually(lambda: condition(server) == ("failed", "its reverse proxy (nginx) has ended"))

    with pytest.raises(ServerDiedError, match=r"the reverse proxy \(nginx\) has ended by itself"):
        serve_foreground(repository_of(tmp_path, tp=1), spec, store=store, on_ready=kill_it)
    assert_gone(seen[0], store)
    assert eventually(lambda: is_free(HOST, spec.proxy_port), 5)


def test_without_nginx_it_is_told_what_to_run(
    tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "NGINX", "no-such-nginx")
    repository, said = repository_of(tmp_path, tp=1), Said()
    spec = replace(free_spec("alone"), oversubscribe=True, instances=2, proxy_port=proxy_ports(), auto_ports=True)
    server = start_server(repository, spec, store=store, progress=said)
    stop_server("alone", store=store)
    assert server.endpoint == server.address
    assert "nginx is not installed" in said.text
    assert f"and run: no-such-nginx -e stderr -p {store.servers / 'alone.proxy'} -c " in said.text


class Said(SilentProgress):
    """What a start tells."""

    def __init__(self) -> None:
        self.text = ""

    def step(self, text: str) -> None:
        self.text += f"{text}\n"

    warn = step


@contextmanager
def thief_of(ports: list[int]) -> Iterator[None]:
    """A program that takes ports after they were found free."""
    with ExitStack() as held:
        for port in ports:
            thief = held.enter_context(socket.socket())
            thief.bind((HOST, port))
            thief.listen(1)
        yield


@pytest.mark.parametrize("flag", ["http_port", "metrics_port"])
def test_auto_ports_outlives_a_thief(
    flag: str, tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(free_spec("robbed"), oversubscribe=True, auto_ports=True)
    monkeypatch.setattr(life, "require_ports", lambda *_: None)
    said = Said()
    with thief_of([getattr(spec, flag)]):
        server = start_server(repository_of(tmp_path, tp=1), spec, store=store, progress=said)
        assert is_ready(server.address)
        assert getattr(server, flag) != getattr(spec, flag)
        stop_server("robbed", store=store)
    assert_gone(server, store)
    assert said.text.count("already in use") == 1
    assert said.text.count("Starting again on other ports.") == 1


def test_a_thief_that_never_rests_wins(
    tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(free_spec("robbed"), oversubscribe=True, auto_ports=True)
    monkeypatch.setattr(life, "require_ports", lambda *_: None)
    monkeypatch.setattr(life, "with_free_ports", lambda spec: spec)
    with thief_of([spec.http_port]), pytest.raises(PortInUseError, match="already in use"):
        start_server(repository_of(tmp_path, tp=1), spec, store=store)
    assert len(doubles.calls("tritonserver")) == 3
    assert list_servers(store) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_a_killed_start_leaves_no_server(tp: int, tmp_path: Path, store: Store, doubles: Doubles) -> None:
    repository, spec = repository_of(tmp_path, tp=tp), free_spec("orphan")
    line = [sys.executable, "-m", "trtserve", "start", "--model-repository", str(repository.path), "--name", "orphan"]
    with subprocess.Popen([*line, "--oversubscribe", *start_flags(spec)], stderr=subprocess.DEVNULL) as one:
        server, _ = running_rank("orphan", 0, store) if tp > 1 else (running_server("orphan", store), 0)
        assert eventually(lambda: is_ready(server.address))
        one.kill()
    assert eventually(lambda: not server.identity.alive())
    assert eventually(lambda: is_free(HOST, spec.http_port))
    assert condition(server)[0] == "failed"
    stop_server("orphan", store=store)
    assert_gone(server, store)

"""Accidents from outside: the proxy dies, ports are taken, the launch itself is killed."""

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
from trtserve.host.ports import free_ports, is_free
from trtserve.progress import SilentProgress
from trtserve.server import front, start
from trtserve.server.discovery import find_server
from trtserve.server.plan import free_pair, plan_server
from trtserve.server.shutdown import stop_server
from trtserve.server.start import start_server
from trtserve.server.state import Server, list_servers
from trtserve.server.status import server_state
from trtserve.server.supervision import serve_foreground
from trtserve.server.triton.tritonserver import is_ready
from trtserve.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that commands use too."""
    return Store(tmp_path / "home")


def proxy_ports() -> int:
    """The first of two neighbouring ports that are free."""
    return free_pair(HOST, random.randrange(20000, 30000), ())


def answers(port: int) -> int:
    """Return the status of the health page on a port; 0 when nothing listens there."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/v2/health/ready", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.needs("nginx")
def test_two_instances_behind_a_proxy(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    repository = repository_of(tmp_path)
    proxy_port = proxy_ports()
    with started(repository, store, instances=2, proxy_port=proxy_port, auto_ports=True) as server:
        assert server_state(server) == ("ready", "")
        devices = {call.environment["CUDA_VISIBLE_DEVICES"] for call in doubles.calls("tritonserver")}
        assert devices == {"0,1", "2,3"}
        assert len(doubles.calls("tritonserver")) == 4
        (shown,) = json.loads(command("status", "--json").stdout)["result"]
        assert len(shown["server"]["instances"]) == 2
        first, second = (instance.address.http_port for instance in server.instances)
        assert f"{proxy_port} → {first},{second}" in command("status").stdout
        # One endpoint for both, which requests go to.
        assert server.proxy is not None
        assert server.endpoint.http_port == proxy_port
        assert [answers(proxy_port) for _ in range(4)] == [200] * 4
        assert not is_free(HOST, proxy_port + 1)
        with pytest.raises(PortInUseError, match="taken by trtserve's server launched"):
            start_server(plan_server(repository, replace(free_spec("b"), http_port=second), store=store))
        other = replace(free_spec("b"), instances=2, proxy_port=proxy_port)
        with pytest.raises(PortInUseError, match=f"--proxy-port {proxy_port} is taken by trtserve's server launched"):
            start_server(plan_server(repository, other, store=store))
        os.kill(server.instances[1].ranks[0].pid, signal.SIGKILL)
        assert eventually(lambda: server_state(find_server(store=store))[0] == "failed")
    assert answers(proxy_port) == 0
    assert not server.proxy.file.parent.exists()
    assert server.proxy.log.exists()


@pytest.mark.needs("nginx")
def test_a_dead_proxy_ends_the_foreground(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    spec = replace(free_spec(), oversubscribe=True, instances=2, proxy_port=proxy_ports(), auto_ports=True)
    seen: list[Server] = []

    def kill_it(server: Server) -> None:
        seen.append(server)
        assert server.proxy is not None
        assert server.proxy.process is not None
        os.kill(server.proxy.process.pid, signal.SIGKILL)
        assert eventually(lambda: server_state(server) == ("failed", "its reverse proxy (nginx) has ended"))

    with pytest.raises(ServerDiedError, match=r"its reverse proxy \(nginx\) has ended"):
        serve_foreground(plan_server(repository_of(tmp_path, tp=1), spec, store=store), on_ready=kill_it)
    assert_gone(seen[0], store)
    assert eventually(lambda: is_free(HOST, spec.proxy_port))


def test_without_nginx_start_prints_the_command_to_run(
    tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "NGINX", "no-such-nginx")
    repository, messages = repository_of(tmp_path, tp=1), Messages()
    spec = replace(free_spec("alone"), oversubscribe=True, instances=2, proxy_port=proxy_ports(), auto_ports=True)
    server = start_server(plan_server(repository, spec, store=store), progress=messages)
    stop_server("alone", store=store)
    assert server.endpoint == server.address
    assert "nginx is not installed" in messages.text
    assert f"and run: no-such-nginx -e stderr -p {store.servers / 'alone.proxy'} -c " in messages.text


class Messages(SilentProgress):
    """The messages of a start."""

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
def test_auto_ports_tries_again_when_a_port_is_taken(
    flag: str, tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(free_spec("robbed"), oversubscribe=True, auto_ports=True)
    monkeypatch.setattr(start, "require_ports", lambda *_: None)
    messages = Messages()
    with thief_of([getattr(spec, flag)]):
        server = start_server(plan_server(repository_of(tmp_path, tp=1), spec, store=store), progress=messages)
        assert is_ready(server.address)
        assert getattr(server.address, flag) != getattr(spec, flag)
        stop_server("robbed", store=store)
    assert_gone(server, store)
    assert messages.text.count("already in use") == 1
    assert messages.text.count("Starting again on other ports.") == 1


def test_the_port_behind_a_gateway_is_drawn_again_when_it_is_taken(
    tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody chose that port, so this needs no --auto-ports."""
    spec = replace(free_spec("robbed", gateway=True), oversubscribe=True)
    first = free_ports(HOST, 1)
    drawn = iter([first])
    monkeypatch.setattr(
        "trtserve.server.plan.free_ports", lambda host, count: next(drawn, None) or free_ports(host, count)
    )
    messages = Messages()
    with thief_of(first):
        server = start_server(plan_server(repository_of(tmp_path, tp=1), spec, store=store), progress=messages)
        assert server.address.ports == {
            "--http-port": spec.http_port,
            "--grpc-port": spec.grpc_port,
            "--metrics-port": spec.metrics_port,
        }
        assert server.address.inner_http_port not in (None, *first)
        stop_server("robbed", store=store)
    assert_gone(server, store)
    assert messages.text.count("Starting again on other ports.") == 1


def test_auto_ports_gives_up_after_three_attempts(
    tmp_path: Path, store: Store, doubles: Doubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(free_spec("robbed"), oversubscribe=True, auto_ports=True)
    monkeypatch.setattr(start, "require_ports", lambda *_: None)
    monkeypatch.setattr("trtserve.server.plan.with_free_ports", lambda spec: spec)
    with thief_of([spec.http_port]), pytest.raises(PortInUseError, match="already in use"):
        start_server(plan_server(repository_of(tmp_path, tp=1), spec, store=store))
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
    assert eventually(lambda: not server.instances[0].process.alive())
    assert eventually(lambda: is_free(HOST, spec.http_port))
    assert server_state(server)[0] == "failed"
    stop_server("orphan", store=store)
    assert_gone(server, store)

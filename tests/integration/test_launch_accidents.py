"""Accidents from outside: the gateway dies, ports are taken, the launch itself is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.doubles import Doubles
from tests.support.launches import (
    assert_gone,
    command,
    repository_of,
    started,
)
from tests.support.servers import HOST, free_spec
from tests.support.waiting import eventually
from trtserve.errors import PortInUseError, ServerDiedError
from trtserve.host.ports import is_free
from trtserve.server.discovery import find_server
from trtserve.server.plan import free_pair, plan_server
from trtserve.server.start import start_server
from trtserve.server.state import Server
from trtserve.server.status import server_state
from trtserve.server.supervision import serve_foreground
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


def test_two_instances_behind_a_gateway(tmp_path: Path, store: Store, doubles: Doubles) -> None:
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
        with pytest.raises(
            PortInUseError, match=f"--proxy-port {proxy_port}, .* are taken by trtserve's server launched"
        ):
            start_server(plan_server(repository, other, store=store))
        os.kill(server.instances[1].ranks[0].pid, signal.SIGKILL)
        assert eventually(lambda: server_state(find_server(store=store))[0] == "failed")
    assert answers(proxy_port) == 0
    assert not server.proxy.gateway.settings.parent.exists()
    assert server.proxy.gateway.log.exists()


def test_a_dead_gateway_in_front_ends_the_foreground(tmp_path: Path, store: Store, doubles: Doubles) -> None:
    spec = replace(free_spec(), oversubscribe=True, instances=2, proxy_port=proxy_ports(), auto_ports=True)
    seen: list[Server] = []

    def kill_it(server: Server) -> None:
        seen.append(server)
        assert server.proxy is not None
        os.kill(server.proxy.gateway.process.pid, signal.SIGKILL)
        assert eventually(lambda: server_state(server)[0] == "failed")

    with pytest.raises(ServerDiedError, match="its gateway, which answers HTTP requests, was killed"):
        serve_foreground(plan_server(repository_of(tmp_path, tp=1), spec, store=store), on_ready=kill_it)
    assert_gone(seen[0], store)
    assert eventually(lambda: is_free(HOST, spec.proxy_port))

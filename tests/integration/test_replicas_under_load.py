"""A gateway in front of several engines under load: one is killed, one stopped, one drained, one added."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateways import HOST, running_gateway
from tests.support.stages import make_repository
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_until
from tests.unit.test_repo_adapters import SPEC, write_engine
from trtserve.host.ports import free_ports

CLIENTS, TOKENS, STEP = 8, 20, "0.02"
KEY = "an-admin-key-of-a-test"


@contextmanager
def engine(repository: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """An engine that answers every request with one token in each step, and its port."""
    (port,) = free_ports(HOST, 1)
    command = [sys.executable, "-m", "tests.support.fast_engine", str(repository), str(port), STEP]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process, port
        finally:
            process.kill()


class Load:
    """Clients that ask again and again, and what became of their answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.whole = 0
        self.cut: list[bytes] = []
        """Answers that ended with an error in the middle."""
        self.lost: list[tuple[int, bytes]] = []
        """Those that had not begun."""
        self._ending = threading.Event()

    def ask(self) -> None:
        """Ask until the end."""
        body = {"model": SPEC.name, "prompt": "Hi", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        while not self._ending.is_set():
            with closing(http.client.HTTPConnection(HOST, self._port, timeout=60)) as connection:
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
            if answer.status != 200 or b'"text"' not in content:
                self.lost.append((answer.status, content))
            elif b'"error"' in content:
                self.cut.append(content)
            else:
                self.whole += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self.ask) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self._ending.set()
            for each in clients:
                each.result()

    def goes_on(self) -> None:
        """Wait until more answers have come."""
        before = self.whole
        wait_until(lambda: self.whole >= before + CLIENTS)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = write_engine(tmp_path / "engine")
    tokenizer = write_tiny_model(tmp_path / "model")
    return make_repository(made, tokenizer, SPEC).path


def test_no_answer_is_lost_that_had_not_begun(repository: Path, tmp_path: Path) -> None:
    key = tmp_path / "admin-key"
    key.write_text(KEY)
    key.chmod(0o600)
    with ExitStack() as stack:
        (first, first_port), (second, second_port), (_, third_port) = (
            stack.enter_context(engine(repository)) for _ in range(3)
        )
        settings: dict[str, Any] = {
            "own": False,
            "model": "",
            "tokenizer": tmp_path / "model",
            "replicas": (f"{HOST}:{second_port}",),
            "admin_key_file": key,
            "processes": 2,
        }
        gateway = stack.enter_context(running_gateway(tmp_path, 1, grpc_port=first_port, live=False, **settings))

        def listed(action: str = "", port: int = 0) -> dict[str, dict[str, Any]]:
            body = json.dumps({"address": f"{HOST}:{port}"}) if action else None
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            with gateway.connected() as connection:
                connection.request("POST" if action else "GET", f"/replicas/{action}".rstrip("/"), body, headers)
                answer = connection.getresponse()
                content = json.loads(answer.read())
            assert answer.status == 200, content
            return {each["address"]: each for each in content["replicas"]}

        def state(port: int) -> str:
            return str(listed()[f"{HOST}:{port}"]["state"])

        def runs(port: int) -> int:
            return int(listed()[f"{HOST}:{port}"]["running"])

        load = Load(gateway.port)
        wait_until(lambda: gateway.status("/health") == 200)
        with load.running():
            load.goes_on()
            wait_until(lambda: runs(first_port) > 0 and runs(second_port) > 0)
            second.kill()
            wait_until(lambda: state(second_port) == "down")
            load.goes_on()
            assert len(load.cut) <= CLIENTS
            listed("add", third_port)
            wait_until(lambda: runs(third_port) > 0)
            first.send_signal(signal.SIGSTOP)
            wait_until(lambda: state(first_port) == "down")
            load.goes_on()
            first.send_signal(signal.SIGCONT)
            wait_until(lambda: state(first_port) == "ready" and runs(first_port) > 0)
            load.goes_on()
            cut = len(load.cut)
            listed("drain", third_port)
            wait_until(lambda: runs(third_port) == 0)
            load.goes_on()
            assert runs(third_port) == 0
            listed("remove", third_port)
            load.goes_on()
            assert len(load.cut) == cut  # nobody noticed
        assert load.lost == []
        assert cut <= 2 * CLIENTS

"""The life of a real Triton: ready or explained, supervised, stopped without a trace."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.support.commands import spare_round_trip
from tests.support.launches import assert_gone, command, start_flags
from tests.support.servers import HOST, free_spec, running_server
from tests.support.waiting import eventually, wait_until
from trtserve.artifacts import ModelRepository
from trtserve.errors import PortInUseError, ServerNotFoundError, ServerStartError
from trtserve.host.ports import is_free
from trtserve.process import tree
from trtserve.server.discovery import find_server
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.server.plan import plan_server
from trtserve.server.shutdown import stop_server
from trtserve.server.start import start_server
from trtserve.server.state import Server, list_servers, log_file, recorded_server
from trtserve.server.status import server_state
from trtserve.server.triton.tritonserver import shared_memory_regions
from trtserve.specs import ServerSpec
from trtserve.store import Store

pytestmark = pytest.mark.triton

MODEL = "import time\n\nclass TritonPythonModel:\n    def initialize(self, args):\n        {body}\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store that commands use too."""
    spare_round_trip(tmp_path / "home")
    return Store(tmp_path / "home")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_probe_repository(tmp_path / "probe")


def add_model(repository: Path, name: str, body: str) -> None:
    """Add a model that has only `initialize`."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL.format(body=body))
    (repository / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "python"\n')


def start_line(repository: Path, spec: ServerSpec) -> list[str]:
    return ["start", "--model-repository", str(repository), *start_flags(replace(spec, raw_http=False))]


@contextmanager
def foreground(repository: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `trtserve start` in its own process, and kill it at the end if it still runs."""
    line = [sys.executable, "-m", "trtserve", *start_line(repository, free_spec())]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def running(store: Store) -> Server:
    """The server `probe`, once it is ready."""
    assert eventually(lambda: (found := recorded_server("probe", store)) is not None and found.state == "ready")
    return find_server("probe", store=store)


def test_commands_in_the_background(repository: Path, store: Store) -> None:
    spec = free_spec()
    started = command(*start_line(repository, spec), "--detach")
    assert started.returncode == 0, started.stderr
    assert started.stdout == f"http://{HOST}:{spec.http_port}\n"
    assert "answers in one piece" in started.stderr
    assert 'trtserve query "What is ML?"' in started.stderr
    server = find_server(store=store)
    (shown,) = json.loads(command("status", "--json").stdout)["result"]
    assert (shown["state"], shown["models"]) == ("ready", {"probe": "READY"})
    lines = json.loads(command("logs", "-n", "20", "--json").stdout)["result"]["lines"]
    assert len(lines) == 20
    assert "Started HTTPService" in "".join(lines)
    again = command(*start_line(repository, free_spec()), "--detach")
    assert again.returncode == 38
    assert "is already running" in again.stderr
    with pytest.raises(PortInUseError, match=f"--http-port {spec.http_port} is taken by trtserve's server probe"):
        start_server(
            plan_server(ModelRepository(path=repository), ServerSpec(name="b", http_port=spec.http_port), store=store)
        )
    stopped = command("stop")
    assert (stopped.returncode, stopped.stdout) == (0, "probe\n")
    assert_gone(server, store)


def test_two_servers_start_and_stop_again_and_again(repository: Path, store: Store) -> None:
    def live_twice(name: str) -> list[Server]:
        lived = []
        for _ in range(2):
            with running_server(repository, home=store.root, name=name, gracefully=True) as server:
                assert server_state(server) == ("ready", "")
                assert len(server.instances[0].stubs) == 1
            lived.append(server)
        return lived

    with ThreadPoolExecutor() as pool:
        for server in itertools.chain(*pool.map(live_twice, ("one", "two"))):
            assert_gone(server, store)


def test_foreground_ends_with_a_signal(repository: Path, store: Store) -> None:
    with foreground(repository) as process:
        server = running(store)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output == f"http://{HOST}:{server.address.http_port}\n"
    assert "second terminal" in errors
    assert_gone(server, store)


def test_foreground_ends_in_order_when_it_is_stopped_elsewhere(repository: Path, store: Store) -> None:
    line = [sys.executable, "-m", "trtserve", "logs", "--follow"]
    with foreground(repository) as process:
        server = running(store)
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as follower:
            stopped = command("stop", "--all")
            _, errors = process.communicate(timeout=60)
            followed, _ = follower.communicate(timeout=60)
    assert (stopped.returncode, process.returncode, follower.returncode) == (0, 0, 0), errors
    assert "Signal (15) received" in followed
    assert_gone(server, store)


def test_second_interrupt_kills_at_once(repository: Path, store: Store) -> None:
    add_model(repository, "late", "type(self).finalize = lambda self: time.sleep(60)")
    with foreground(repository) as process:
        server = running(store)
        process.send_signal(signal.SIGINT)
        assert eventually(lambda: "Signal (15) received" in server.instances[0].log.read_text())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert "successfully unloaded 'late'" not in server.instances[0].log.read_text()
    assert_gone(server, store)


def test_interrupt_while_models_load(repository: Path, store: Store) -> None:
    add_model(repository, "slow", "time.sleep(60)")
    with foreground(repository) as process:
        assert eventually(lambda: recorded_server("probe", store) is not None)
        server = recorded_server("probe", store)
        assert server is not None
        assert eventually(lambda: "successfully loaded 'probe'" in server.instances[0].log.read_text())
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert_gone(server, store)


def test_killed_server_is_explained_and_replaced(repository: Path, store: Store) -> None:
    with running_server(repository, home=store.root) as server:
        os.kill(server.instances[0].process.pid, signal.SIGKILL)
        assert eventually(lambda: server_state(server)[0] == "failed")
        status = command("status", "probe")
        assert status.returncode == 35
        assert "\nprobe\tfailed\t" in status.stdout
        with running_server(repository, home=store.root) as replacement:
            assert replacement.instances[0].process.pid != server.instances[0].process.pid
            assert not shared_memory_regions(server.shm_prefix)
            assert not tree(server.instances[0].process)
            os.kill(replacement.instances[0].process.pid, signal.SIGKILL)
            assert eventually(lambda: not replacement.instances[0].process.alive())
            with pytest.raises(ServerNotFoundError, match="ended without being stopped"):
                find_server("probe", store=store)
            assert stop_twice(store) == 33


def stop_twice(store: Store) -> int:
    """Clean up after the dead server, then stop it again and return the exit code."""
    if recorded_server("probe", store) is not None:
        stop_server("probe", store=store)
    return command("stop", "probe").returncode


def test_every_failing_model_is_named_with_its_reason(repository: Path, store: Store) -> None:
    add_model(repository, "raising", "raise FileNotFoundError('the engine rank0.bin is gone')")
    add_model(repository, "unfinished", "x = (")
    spec = free_spec()
    with pytest.raises(ServerStartError) as caught:
        start_server(plan_server(ModelRepository(path=repository), spec, store=store))
    message = caught.value.message
    assert "model raising: FileNotFoundError: the engine rank0.bin is gone" in message
    assert "model unfinished: SyntaxError" in message
    assert "CUDA" not in message
    assert caught.value.log == log_file("probe", store)
    assert caught.value.log.exists()
    failed = recorded_server("probe", store)
    assert failed is not None
    assert failed.failure is not None
    assert (failed.state, failed.failure.message) == ("failed", message)
    assert all(is_free(HOST, port) for port in (spec.http_port, spec.grpc_port, spec.metrics_port))
    assert not [process for process in psutil.process_iter() if _serves(process, repository)]


def test_models_that_never_end_loading_are_named(repository: Path, store: Store) -> None:
    add_model(repository, "endless", "time.sleep(60)")
    with pytest.raises(ServerStartError, match=r"not ready after 2 s; models still loading: .*endless") as caught:
        start_server(plan_server(ModelRepository(path=repository), free_spec(ready_timeout=2.0), store=store))
    assert re.search(r"\n  endless: [\d.]+ [KM]i?B, \d+ % CPU\n  last line: \w", caught.value.message)
    assert list_servers(store) == []


def test_two_starts_that_found_the_same_ports_free(
    repository: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtserve.server.checks.is_free", lambda _host, _port: True)
    with running_server(repository, home=store.root) as first:
        spec = replace(free_spec("second"), http_port=first.address.http_port)
        with pytest.raises(PortInUseError, match="already in use"):
            start_server(plan_server(ModelRepository(path=repository), spec, store=store))
        assert server_state(first) == ("ready", "")
    assert list_servers(store) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_detached_start_that_is_ended_early_leaves_nothing(
    repository: Path, store: Store, number: signal.Signals
) -> None:
    add_model(repository, "endless", "time.sleep(60)")
    line = [sys.executable, "-m", "trtserve", *start_line(repository, free_spec()), "--detach"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert eventually(lambda: recorded_server("probe", store) is not None)
        server = recorded_server("probe", store)
        assert server is not None
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert_gone(server, store)


def _serves(process: psutil.Process, repository: Path) -> bool:
    try:
        return any(str(repository) in argument for argument in process.cmdline())
    except psutil.Error:
        return False


# A supervisor that takes its time before it records its server, and the command that starts it.
SUPERVISOR = """
import sys, time
from pathlib import Path
from tests.support.server_records import server_record
from trtserve.server.state import write_state
from trtserve.store import Store
home = Path(sys.argv[1])
(home / "begun").touch()
while not (home / "record").exists():
    time.sleep(0.01)
write_state(server_record("demo", store=Store(home), state="starting"), Store(home))
time.sleep(600)
"""
LAUNCHER = """
import sys
import threading
from pathlib import Path
from trtserve.process import Command
from trtserve.server import detach
from trtserve.specs import ServerSpec
from trtserve.store import Store
detach.Command = lambda **_: Command(argv=(sys.executable, "-c", sys.argv[2], sys.argv[1]))
detach.run_in_background("demo", lambda pipe: [], ServerSpec(), store=Store(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("name", ["demo", None])
def test_stop_waits_for_the_server_of_a_killed_launcher(tmp_path: Path, name: str | None) -> None:
    store = Store(tmp_path)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), SUPERVISOR])
    wait_until((tmp_path / "begun").exists, 60)
    launcher.kill()
    launcher.wait()
    assert recorded_server("demo", store) is None
    recording = threading.Timer(0.3, (tmp_path / "record").touch)
    recording.start()
    stopped = stop_server(name, store=store)
    recording.join()
    assert not stopped.instances[0].process.alive()
    assert recorded_server("demo", store) is None

"""Ports that another program holds: whose answer counts as the readiness of a server that was just started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import free_spec
from trtserve.artifacts import ModelRepository
from trtserve.errors import PortInUseError, ServerStartError, TrtserveError
from trtserve.process import Command, ProcessId, spawn, stop
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.server.front import await_gateway
from trtserve.server.plan import plan_server
from trtserve.server.start import start_server
from trtserve.server.state import GatewayState
from trtserve.server.triton import tritonserver
from trtserve.server.triton.tritonserver import Address
from trtserve.specs import ServerSpec
from trtserve.store import Store


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """A port on which this very process listens, and which answers that it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        monkeypatch.setattr(tritonserver, "is_ready", lambda _address: True)
        yield Address(host="127.0.0.1", http_port=held.getsockname()[1], grpc_port=2, metrics_port=3)


def test_the_answer_of_another_server_on_the_port_does_not_count(address: Address, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ours = spawn(Command(argv=("sleep", "600")), log=log)
    try:
        with pytest.raises(ServerStartError, match=r"not ready after 0\.3 s"):
            tritonserver.wait_until_ready(ours, address, log, timeout=0.3)
    finally:
        assert stop(ours, grace=1)


def test_the_answer_of_the_process_itself_counts_and_that_of_an_invisible_owner(
    address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    myself = ProcessId.of(os.getpid())
    assert myself is not None
    tritonserver.wait_until_ready(myself, address, tmp_path / "log", timeout=60)
    monkeypatch.setattr(tritonserver, "listeners", lambda _port: [])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        identity = ProcessId.of(other.pid)
        assert identity is not None
        tritonserver.wait_until_ready(identity, address, tmp_path / "log", timeout=60)
        other.communicate(b"\n")


@pytest.mark.parametrize(
    ("before", "error", "hint"),
    [
        ("", PortInUseError, "--auto-ports"),
        ("[warn] /tmp/evutil.c: pipe: Too many open files\n", ServerStartError, "ulimit -n 4096"),
    ],
)
def test_a_port_lost_to_another_program_is_reported(
    before: str, error: type[TrtserveError], hint: str, tmp_path: Path
) -> None:
    """Without file descriptors Triton's HTTP library says the same of a free port."""
    reason = "failed to start GRPC service: Unavailable - Socket '127.0.0.1:1' already in use "
    line = f'{before}E1120 12:17:16.145471 9428 main.cc:245] "{reason}"'
    identity = spawn(Command(argv=(sys.executable, "-c", f"import sys; sys.exit({line!r})")), log=tmp_path / "log")
    nobody = Address(host="127.0.0.1", http_port=1, grpc_port=2, metrics_port=3)
    with pytest.raises(error, match="already in use") as caught:
        tritonserver.wait_until_ready(identity, nobody, tmp_path / "log", timeout=60)
    assert hint in str(caught.value.hint)


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    return ModelRepository(path=write_probe_repository(tmp_path / "probe"))


def test_a_foreign_triton_on_a_port_is_recognised(tmp_path: Path, repository: ModelRepository) -> None:
    store = Store(tmp_path / "home")
    # A listener whose program has the name of Triton's.
    program = tmp_path / "tritonserver"
    program.symlink_to(sys.executable)
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([program, "-c", listen], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with pytest.raises(PortInUseError, match="a Triton server that was not started from this store, process"):
            start_server(plan_server(repository, ServerSpec(http_port=port), store=store))
        process.communicate("\n", timeout=60)


@pytest.mark.parametrize(
    ("program", "kind", "words", "killed"),
    [
        ("raise SystemExit(31)", PortInUseError, r"HTTP port \d+ cannot be opened", None),
        (
            "import os; os.kill(os.getpid(), 9)",
            ServerStartError,
            "gateway, which answers HTTP requests, has ended",
            True,
        ),
        ("raise SystemExit('no')", ServerStartError, "has ended. Last lines:\n  no", False),
    ],
)
def test_a_gateway_that_ends_says_why(
    program: str,
    kind: type[TrtserveError],
    words: str,
    killed: bool | None,
    tmp_path: Path,
    repository: ModelRepository,
) -> None:
    planned = plan_server(repository, free_spec(gateway=True), store=Store(tmp_path / "home")).instances[0].gateway
    assert planned is not None
    process = spawn(Command(argv=(sys.executable, "-c", program)), log=planned.log)
    with pytest.raises(kind, match=words) as caught:
        await_gateway(planned, GatewayState(process=process, log=planned.log, settings=planned.file))
    assert getattr(caught.value, "killed", None) == killed

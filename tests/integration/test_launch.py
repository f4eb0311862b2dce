"""Whose answer on a port counts as the readiness of a server that was just started."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtserve.errors import PortInUseError, ServerStartError
from trtserve.process import Command, ProcessId, spawn, stop
from trtserve.server.triton import tritonserver
from trtserve.server.triton.tritonserver import Address


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """A port on which this very process listens, and which answers that it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        monkeypatch.setattr(tritonserver, "is_ready", lambda _address: True)
        yield Address(host="127.0.0.1", http_port=held.getsockname()[1], grpc_port=2, metrics_port=3)


def test_the_answer_of_another_server_on_the_port_does_not_count(address: Address, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ours = spawn(Command(argv=("sleep", "30")), log=log)
    try:
        with pytest.raises(ServerStartError, match=r"not ready after 0\.3 s"):
            tritonserver.wait_until_ready(ours, address, log, timeout=0.3)
    finally:
        assert stop(ours, grace=1)


def test_an_answer_counts_when_the_owner_of_the_port_is_invisible(
    address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tritonserver, "listeners", lambda _port: [])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        identity = ProcessId.of(other.pid)
        assert identity is not None
        tritonserver.wait_until_ready(identity, address, tmp_path / "log", timeout=1)
        other.communicate(b"\n")


def test_a_port_lost_to_another_program_is_reported(tmp_path: Path) -> None:
    reason = "failed to start GRPC service: Unavailable - Socket '127.0.0.1:1' already in use "
    line = f'E1120 12:17:16.145471 9428 main.cc:245] "{reason}"'
    identity = spawn(Command(argv=(sys.executable, "-c", f"import sys; sys.exit({line!r})")), log=tmp_path / "log")
    nobody = Address(host="127.0.0.1", http_port=1, grpc_port=2, metrics_port=3)
    with pytest.raises(PortInUseError, match="already in use") as caught:
        tritonserver.wait_until_ready(identity, nobody, tmp_path / "log", timeout=10)
    assert "--auto-ports" in str(caught.value.hint)

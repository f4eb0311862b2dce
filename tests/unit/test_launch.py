"""Which answer counts as the readiness of a server that was just started."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from trtserve.process import ProcessId
from trtserve.server.triton import tritonserver
from trtserve.server.triton.tritonserver import Address


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """A port on which this very process listens, and which answers that it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        monkeypatch.setattr(tritonserver, "is_ready", lambda _address: True)
        yield Address(host="127.0.0.1", http_port=held.getsockname()[1], grpc_port=2, metrics_port=3)


def test_the_answer_of_the_process_itself_counts(address: Address, tmp_path: Path) -> None:
    myself = ProcessId.of(os.getpid())
    assert myself is not None
    tritonserver.wait_until_ready(myself, address, tmp_path / "log", timeout=1)

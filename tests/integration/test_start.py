"""A port that another Triton server holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trtserve.artifacts import ModelRepository
from trtserve.errors import PortInUseError
from trtserve.server.doctor.stub import write_probe_repository
from trtserve.server.plan import plan_server
from trtserve.server.start import start_server
from trtserve.specs import ServerSpec
from trtserve.store import Store


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
        process.communicate("\n", timeout=20)

"""Several processes of a gateway while they start: a signal ends them, and one that is killed has a pause."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

PARENT = """
import logging, os, signal, socket, sys, time
from pathlib import Path
from trtserve.gateway import listener
from trtserve.gateway.processes import serve
from trtserve.gateway.settings import GatewaySettings

def starting(*_):
    with Path("started").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    KILL
    time.sleep(60)

listener.serve = starting
here = "127.0.0.1:1"
settings = GatewaySettings(
    name="x", model="m", host="127.0.0.1", port=1, triton_http=here, triton_grpc=here, metrics=here, processes=2
)
with socket.socket() as listening:
    sys.exit(serve(settings, listening))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_processes_that_do_not_serve_yet(tmp_path: Path, number: int) -> None:
    started = tmp_path / "started"
    with subprocess.Popen([sys.executable, "-c", PARENT.replace("KILL", "")], cwd=tmp_path) as parent:
        try:
            wait_until(lambda: started.exists() and len(started.read_text().split()) == 2)
            parent.send_signal(number)
            assert parent.wait(60) == 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in started.read_text().split())
        finally:
            parent.kill()


def test_a_process_that_is_killed_at_its_start_is_started_ever_less_often(tmp_path: Path) -> None:
    code = PARENT.replace("KILL", "os.kill(os.getpid(), signal.SIGKILL)")
    started = tmp_path / "started"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL) as parent:
        try:
            wait_until(lambda: started.exists() and len(started.read_text().split()) >= 4)
            time.sleep(3)
            assert 4 <= len(started.read_text().split()) <= 14  # in turn after 0.1, 0.2, 0.4, 0.8 and 1.6 s
            parent.terminate()
            assert parent.wait(60) == 0
        finally:
            parent.kill()

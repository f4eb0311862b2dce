"""Double of `trtllm-llmapi-launch` with its leader and worker nodes (script at 020c89e6).

As the real script does, it splits the command at blanks (so no argument may
contain one), drops every MPI and Slurm variable for the command of rank 0, does not run the command on other ranks, and
stops the leader only after a command that ended with 0: one that fails leaves leader and workers waiting for ever.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tests.doubles.ranks import Meeting
from tests.doubles.settings import read_settings, record_call

_DROPPED = (
    "OMPI_",
    "PMIX_",
    "PMI_",
    "SLURM_",
    "MPI_",
    "UCX_",
    "I_MPI_",
    "HYDRA_",
    "KMP_",
    "MPICH_",
    "MV2_",
    "CRAY_",
)
_FIRST_PORT = 10012
_PAUSE = 0.05


def _first(*names: str, default: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), default)


def _free_port() -> int:
    for port in range(_FIRST_PORT, 65536):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise SystemExit("no free port")


def _run_command(words: list[str], meeting: Meeting) -> NoReturn:
    """The background half of rank 0: the command without MPI's variables, then the leader's end."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith(_DROPPED)}
    child = subprocess.Popen(words, env=environment)

    def hand_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    signal.signal(signal.SIGTERM, hand_on)
    code = child.wait()
    if code == 0:
        meeting.tell(0, "stopped")
    os._exit(code if code >= 0 else 128 - code)


def _wait(meeting: Meeting) -> int:
    """Serve as leader or worker node until the leader is stopped."""
    while not meeting.told(0, "stopped"):
        time.sleep(_PAUSE)
    return 0


def main(arguments: list[str], folder: Path) -> int:
    """Run the double; returns the exit code."""
    record_call(folder, "trtllm-llmapi-launch", arguments)
    read_settings(folder)
    if not arguments:
        sys.stderr.write("(strict double) no command was given\n")
        return 2
    if blank := [argument for argument in arguments if not argument or argument.split() != [argument]]:
        sys.stderr.write(f"(strict double) the script splits this argument at its blanks: {blank[0]!r}\n")
        return 2
    rank = int(_first("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID", default="0"))
    size = _first("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", default="1")
    sys.stderr.write(f"\033[33mmpi_rank: {rank}\033[0m\n\033[33mtllm_mpi_size: {size}\033[0m\n")
    sys.stderr.flush()
    meeting = Meeting(folder, int(size))
    os.environ["TLLM_SPAWN_PROXY_PROCESS"] = "1"
    os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_ADDR"] = f"tcp://127.0.0.1:{_free_port()}"
    os.environ["TLLM_SPAWN_PROXY_PROCESS_IPC_HMAC_KEY"] = secrets.token_hex(32)
    os.environ["tllm_mpi_size"] = size  # noqa: SIM112 - upstream's spelling
    node = "leader" if rank == 0 else "worker"
    record_call(folder, f"mgmn_{node}_node", [])
    if rank != 0:
        return _wait(meeting)
    if os.fork() == 0:
        _run_command(arguments, meeting)
    return _wait(meeting)

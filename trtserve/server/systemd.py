"""A server as a service of systemd: its unit, and the messages that systemd gets of it."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from trtserve.artifacts import ModelRepository
from trtserve.errors import UsageError
from trtserve.server.detach import start_arguments
from trtserve.server.render import render
from trtserve.server.state import server_name
from trtserve.specs import ServerSpec
from trtserve.store import Store

_DRAIN = 30


def plan_unit(repository: ModelRepository, spec: ServerSpec, *, out: Path | None, store: Store) -> tuple[Path, str]:
    """Return the file of a server's unit and its text. Raises UsageError for what a unit cannot have."""
    if spec.api_key is not None:
        raise UsageError("A unit would show the API key to everyone.", hint="Give it in a file: --api-key-file FILE")
    name = server_name(repository, spec)
    path = (out or Path(f"trtserve-{name}.service")).absolute()
    if path.suffix != ".service":
        raise UsageError(f"--out {path} is not a unit file.", hint="Its name must end with .service.")
    program = [sys.executable, "-m", "trtserve"]
    return path, render(
        "server.service.j2",
        name=name,
        start=[*program, *start_arguments(repository, spec)],
        stop=[*program, "stop", name, "--drain", str(_DRAIN)],
        home=f"TRTSERVE_HOME={store.root}",
        start_seconds=int(spec.ready_timeout) + 60,
        stop_seconds=_DRAIN + 60,
    )


def notify(message: str) -> None:
    """Send systemd a message, such as READY=1; do nothing when it did not start this process (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
        connection.setblocking(False)
        try:
            # A leading @ names an abstract socket.
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
            connection.sendall(message.encode())
        except OSError:  # systemd has gone, or its socket is full: the next message will do
            return

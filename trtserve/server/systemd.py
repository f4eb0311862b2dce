"""Servers as services of systemd: the unit file, and the messages that a service of Type=notify sends."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from trtserve.artifacts import ModelRepository
from trtserve.errors import UsageError
from trtserve.server.render import render
from trtserve.server.state import server_name
from trtserve.specs import ServerSpec
from trtserve.specs.command_line import spec_arguments
from trtserve.store import Store

_DRAIN = 30


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


def start_arguments(repository: ModelRepository, spec: ServerSpec, *, report_to: int | None = None) -> list[str]:
    """Return the arguments of the `trtserve` that serves `repository`, and that reports to an open file."""
    words = ["start", "--model-repository", str(repository.path.absolute()), "--no-rebuild", *spec_arguments(spec)]
    words += ["--name", server_name(repository, spec)]
    words += [] if report_to is None else ["--report-to", str(report_to)]
    return [*words, "--", *spec.extra_arguments] if spec.extra_arguments else words


def plan_unit(repository: ModelRepository, spec: ServerSpec, *, out: Path | None, store: Store) -> tuple[Path, str]:
    """Return the file of a server's unit and its text. Raises UsageError for what a unit cannot have."""
    if spec.api_key is not None:
        raise UsageError("A unit would show the API key to everyone.", hint="Give it in a file: --api-key-file FILE")
    name = server_name(repository, spec)
    path = (out or Path(f"trtserve-{name}.service")).absolute()
    if path.suffix != ".service":
        raise UsageError(f"--out {path} is no unit file.", hint="Its name must end with .service.")
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

"""A gateway in front of a server that a test has already."""

from __future__ import annotations

import http.client
import ssl
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_until
from trtserve.gateway.settings import GatewaySettings
from trtserve.host.ports import free_ports
from trtserve.process import Command, ProcessId, spawn, stop

HOST = "127.0.0.1"


def settings_of(**changes: Any) -> GatewaySettings:
    """Settings of a gateway in front of servers that do not answer."""
    nobody = {"triton_http": f"{HOST}:1", "triton_grpc": f"{HOST}:1", "metrics": f"{HOST}:1"}
    return GatewaySettings(**{"name": "gateway", "host": HOST, "port": 1, **nobody, "model": "m", **changes})


@dataclass(frozen=True)
class RunningGateway:
    """A gateway that answers."""

    port: int
    process: ProcessId
    log: Path
    root: Path | None = None
    """Certificate of the authority, with TLS."""

    @contextmanager
    def connected(self) -> Iterator[http.client.HTTPConnection]:
        """A connection to it."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        if self.root is not None:
            context = ssl.create_default_context(cafile=str(self.root))
            connection = http.client.HTTPSConnection(HOST, self.port, timeout=60, context=context)
        with closing(connection):
            yield connection

    def status(self, path: str) -> int | None:
        """Status of a GET, or None when nobody answers."""
        try:
            with self.connected() as connection:
                connection.request("GET", path)
                return connection.getresponse().status
        except OSError:
            return None


@contextmanager
def running_gateway(
    folder: Path, http_port: int, *, grpc_port: int = 1, live: bool = True, root: Path | None = None, **settings: Any
) -> Iterator[RunningGateway]:
    """A gateway for the Triton on these ports; `settings` are further fields of GatewaySettings.

    `live`: wait until Triton answers it over HTTP too. `root`: it speaks TLS, with a certificate of this authority.
    """
    (port,) = free_ports(HOST, 1)
    GatewaySettings(
        name="gateway",
        host=HOST,
        port=port,
        triton_http=f"{HOST}:{http_port}",
        triton_grpc=f"{HOST}:{grpc_port}",
        metrics=f"{HOST}:1",
        **settings,
    ).write(folder / "gateway.json")
    command = Command(argv=(sys.executable, "-m", "trtserve.gateway", str(folder / "gateway.json")), cwd=folder)
    log = folder / "gateway.log"
    gateway = RunningGateway(port, spawn(command, log=log), log, root)
    try:
        wait_until(lambda: gateway.status("/v2/health/live") in ((200,) if live else (200, 503)))
        yield gateway
    finally:
        stop(gateway.process, grace=0)

"""Records of servers that were never started: their process is the one that runs the tests."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtserve.process import ProcessId
from trtserve.server.state import GatewayState, Instance, ProxyState, Server, log_file
from trtserve.server.triton.tritonserver import Address
from trtserve.store import Store


def proxy_record(http_port: int, *, log: Path = Path("log"), pid: int = 12, started: float = 3.0) -> ProxyState:
    """Return the gateway in front of several instances, whose gRPC port is the next one."""
    gateway = GatewayState(process=ProcessId(pid=pid, started=started), log=log, settings=Path("settings.json"))
    return ProxyState(gateway=gateway, http_port=http_port, grpc_port=http_port + 1)


def server_record(
    name: str = "demo",
    *,
    http_port: int = 1,
    grpc_port: int = 2,
    metrics_port: int = 3,
    age: float = 0.0,
    store: Store | None = None,
    **changes: Any,
) -> Server:
    """Return a running server; with an `age` in seconds its process is an earlier one that had our pid.

    `changes` are fields of the server, or of its only instance.
    """
    own = ProcessId.of(os.getpid())
    assert own is not None
    instance = Instance(
        address=Address(host="127.0.0.1", http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port),
        process=replace(own, started=own.started - age),
        log=log_file(name, store or Store()),
    )
    of_instance = {key: changes.pop(key) for key in ("stubs", "ranks", "container") if key in changes}
    server = Server(
        name=name,
        repository=Path("/repository"),
        model=name,
        streaming=True,
        state="ready",
        shm_prefix="",
        instances=(replace(instance, **of_instance),),
    )
    return replace(server, **changes)

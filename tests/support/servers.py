"""Real servers for tests: started on free ports in a store of their own, log printed on failure, always stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from trtserve.artifacts import ModelRepository, load_artifact
from trtserve.ports import free_ports
from trtserve.servers import Server, list_servers, log_file
from trtserve.specs import ServerSpec
from trtserve.start import start_server, stop_server
from trtserve.store import Store

HOST = "127.0.0.1"
READY_TIMEOUT = 60.0


def free_spec(name: str | None = None, *, ready_timeout: float = READY_TIMEOUT) -> ServerSpec:
    """A server on three ports that are free now."""
    http_port, grpc_port, metrics_port = free_ports(HOST, 3)
    return ServerSpec(
        name=name,
        host=HOST,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        ready_timeout=ready_timeout,
    )


@contextmanager
def running_server(
    repository: Path, *, home: Path, name: str | None = None, flags: tuple[str, ...] = ()
) -> Iterator[Server]:
    """A ready server for `repository`; state and log lie below `home`, `flags` go to tritonserver.

    Give $TRTSERVE_HOME as `home` when commands under test shall find it; fixtures of a wider scope use a
    `tmp_path_factory` folder and set the variable in the test. The log goes to stderr when the block fails.
    """
    store = Store(home)
    artifact = load_artifact(ModelRepository, repository)
    spec = replace(free_spec(name), extra_arguments=flags)
    try:
        yield start_server(ModelRepository(path=artifact.path, manifest=artifact.manifest), spec, store=store)
    except BaseException:
        _print_log(log_file(name or artifact.name, store))
        raise
    finally:
        for server in list_servers(store):
            if server.http_port == spec.http_port:
                stop_server(server.name, store=store)


def _print_log(log: Path) -> None:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else "(no log)"
    sys.stderr.write(f"--- {log}\n{text}\n---\n")

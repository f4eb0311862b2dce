"""What each server on this machine is doing, with the figures that explain its speed: precision, KV cache, machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtserve.artifacts import ModelRepository, load_artifact
from trtserve.errors import TrtserveError
from trtserve.machine import differences
from trtserve.servers import (
    Condition,
    Server,
    condition,
    find_server,
    recorded_server,
    recorded_servers,
    telling_log,
)
from trtserve.store import Store
from trtserve.triton.preflight import Served, inspect_repository
from trtserve.triton.server import kv_blocks, model_states

_SILENT = "its process runs, but its HTTP port {port} does not answer: it hangs, or was started without that port."


@dataclass(frozen=True, kw_only=True)
class Status:
    """One server now: Triton's state of each model, and KV cache blocks by kind as the core model counts them.

    `log` is that of the part that ended, if the server has failed. `without_meaning` are the parameters that its
    repository sets and that its runtime ignores.
    """

    server: Server
    condition: Condition
    reason: str
    log: Path
    models: Mapping[str, str] = field(default_factory=dict)
    precision: Mapping[str, str] = field(default_factory=dict)
    kv_blocks: Mapping[str, int] = field(default_factory=dict)
    without_meaning: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def server_status(name: str | None = None, *, store: Store | None = None) -> list[Status]:
    """Status of the server `name`, or of all that have a state file; ServerNotFoundError when it has none."""
    store = store or Store()
    if name is None:
        return [_status(server) for server in recorded_servers(store)]
    return [_status(recorded_server(name, store) or find_server(name, store=store))]


def _status(server: Server) -> Status:
    state, reason = condition(server)
    served = _served(server)
    alive = server.identity.alive()
    models = model_states(server.address) if alive else {}
    silent = state == "running" and not models
    blocks = kv_blocks(server.address) if alive else {}
    return Status(
        server=server,
        condition=state,
        reason=reason,
        log=telling_log(server),
        models=models,
        precision={} if served is None else served.precision,
        kv_blocks=blocks,
        without_meaning=() if served is None else served.without_meaning,
        warnings=(
            *([_SILENT.format(port=server.address.http_port)] if silent else ()),
            *(() if served is None else (*differences(served.machine), *served.cache_warnings(blocks))),
        ),
    )


def _served(server: Server) -> Served | None:
    """What the repository says now; None when it was removed or changed into something unreadable meanwhile."""
    try:
        artifact = load_artifact(ModelRepository, server.repository)
        return inspect_repository(ModelRepository(path=artifact.path, manifest=artifact.manifest))
    except (TrtserveError, OSError):
        return None

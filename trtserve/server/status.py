"""What each server on this machine is doing, with the figures that explain its speed: precision, KV cache, machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trtserve.artifacts import ModelRepository, load_artifact
from trtserve.client import metrics
from trtserve.errors import TrtserveError
from trtserve.host.machine import differences
from trtserve.repository.preflight import Served, inspect_repository
from trtserve.repository.profiles import CORE
from trtserve.server.discovery import find_server
from trtserve.server.health import ended, unready_models
from trtserve.server.state import (
    Server,
    State,
    last_record,
    recorded_servers,
)
from trtserve.server.triton.tritonserver import metrics_page, model_states
from trtserve.store import Store


@dataclass(frozen=True, kw_only=True)
class Status:
    """One server now."""

    server: Server
    state: State
    reason: str
    """Why it is not ready; empty while it is ready, and when it was stopped."""
    log: Path
    """Log of the part that has failed, else of the first instance."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Triton's state of each model."""
    uptime: float | None = None
    """Seconds since it became ready."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """Requests of the core models: `running` now and `finished` since Triton was started."""
    precision: Mapping[str, str] = field(default_factory=dict)
    kv_blocks: Mapping[str, int] = field(default_factory=dict)
    """KV cache blocks by kind, as the core model counts them."""
    ignored_parameters: tuple[str, ...] = ()
    """Parameters that the repository sets and that its runtime ignores."""
    warnings: tuple[str, ...] = ()


def server_state(server: Server, store: Store | None = None) -> tuple[State, str]:
    """Return how a server is now, and why if it is not ready."""
    state, reason, _ = _examined(server, store or Store())
    return state, reason


def _examined(server: Server, store: Store) -> tuple[State, str, Path]:
    """Return the state, the reason for it, and the log that explains it."""
    log, supervisor = server.instances[0].log, server.supervisor
    if server.state == "stopped":
        return "stopped", "", log
    if server.state == "failed":
        failure = server.failure
        return "failed", "" if failure is None else failure.message, log if failure is None else failure.log or log
    if supervisor is not None and not supervisor.alive():
        return "failed", f"its supervisor (pid {supervisor.pid}) was killed, which ends the server too", log
    if server.state == "starting" and supervisor is not None and server.reason:
        return "starting", server.reason, log
    if not any(instance.process.alive() for instance in server.instances):
        return "failed", "tritonserver has ended without being stopped", log
    if server.state == "draining":
        return "draining", "it is being stopped", log
    if (end := ended(server, store)) is not None:
        return "failed", end.what, end.log
    if server.state == "starting":
        return "starting", "", log
    reason = "; ".join(f"{model}: {why}" for model, why in unready_models(server, store).items())
    return "degraded" if reason else "ready", reason, log


def server_status(name: str | None = None, *, store: Store | None = None) -> list[Status]:
    """Return the status of the server `name`, also of a stopped one, or of all that were not stopped.

    Raises ServerNotFoundError when it has none.
    """
    store = store or Store()
    if name is None:
        return [_status(server, store) for server in recorded_servers(store)]
    return [_status(last_record(name, store) or find_server(name, store=store), store)]


def _status(server: Server, store: Store) -> Status:
    state, reason, log = _examined(server, store)
    served = _served(server)
    alive = server.instances[0].process.alive()
    page = (metrics_page(server.address) if alive else None) or ""
    blocks = metrics.kv_blocks(page, CORE)
    warnings = []
    if served is not None:
        warnings += [*differences(served.machine), *served.cache_warnings(blocks)]
    return Status(
        server=server,
        state=state,
        reason=reason,
        log=log,
        models=model_states(server.address) if alive else {},
        uptime=None if not alive or server.ready_since is None else time.time() - server.ready_since,
        requests=_requests(page),
        precision={} if served is None else served.precision,
        kv_blocks=blocks,
        ignored_parameters=() if served is None else served.ignored_parameters,
        warnings=tuple(warnings),
    )


def _requests(page: str) -> dict[str, int]:
    cores = metrics.core_metrics(metrics.parse(page))
    if not cores:
        return {}
    running = sum(core.value(metrics.REQUESTS, "active") or 0 for core in cores)
    finished = sum(core.value(metrics.LENGTHS[1], "count") or 0 for core in cores)
    return {"running": int(running), "finished": int(finished)}


def _served(server: Server) -> Served | None:
    """Return what the repository says now, or None when it was removed, or changed into something unreadable."""
    try:
        artifact = load_artifact(ModelRepository, server.repository)
        return inspect_repository(ModelRepository(path=artifact.path, manifest=artifact.manifest))
    except (TrtserveError, OSError):
        return None

"""Find a running server, its log and its endpoint, by its name or because it is the only one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from trtserve.client.endpoint import CONNECT_TIMEOUT, Endpoint
from trtserve.errors import ServerAmbiguousError, ServerNotFoundError
from trtserve.files import is_entry
from trtserve.process import tree
from trtserve.server.state import Server, failure_of, forget, list_servers, log_file, recorded_server, recorded_servers
from trtserve.server.triton import server_log
from trtserve.server.triton.server_log import last_lines
from trtserve.store import Store

_LOADED_WITHIN = 600.0  # seconds for the first answer of a model that is loaded for it


def find_server(name: str | None = None, *, store: Store | None = None, hint: str = "") -> Server:
    """Return the running server `name`; without a name, the only one.

    Raises ServerNotFoundError when there is none, ServerAmbiguousError (with `hint`) when several run and none was
    named.
    """
    store = store or Store()
    living = list_servers(store)
    if name is None:  # a port for many models stands for the servers of those that are loaded
        behind = {model for server in living for model in server.kept or ()}
        living = [server for server in living if server.name not in behind]
    else:
        found = next((server for server in living if server.name == name), None)
        if found is None:
            raise _not_found(name, living, store)
        return found
    if not living:
        message = "No server is running."
        if dead := recorded_servers(store):
            names = ", ".join(server.name for server in dead)
            message += f" {names} ended without being stopped: see `trtserve status`."
        raise ServerNotFoundError(message, hint=how_to_start(store))
    if len(living) > 1:
        names = ", ".join(server.name for server in living)
        raise ServerAmbiguousError(
            f"{len(living)} servers are running: {names}.", hint=hint or "Name one of them: --server NAME."
        )
    return living[0]


def find_log(name: str | None = None) -> Path:
    """Return the log of the server `name`, also when it has ended; `name@2` is the second instance of a server.

    Without a name: of the only server that runs, or when none runs of the last one that ran.
    """
    store = Store()
    if name is not None and is_entry(f"{name}.log"):
        log: Path | None = log_file(name, store)
    else:
        logs = [] if name is not None or list_servers(store) else store.servers.glob("*.log")
        log = max(logs, key=lambda path: path.stat().st_mtime, default=None)
        if log is not None and (own := log_file(log.stem.partition("@")[0], store)).exists():
            log = own  # Triton's log, not that of what kept it running
    if log is None or not log.exists():
        try:
            log = find_server(name, store=store).instances[0].log
        except ServerNotFoundError as error:
            if kept := sorted(path.stem for path in store.servers.glob("*.log")):
                error.hint = f"There are logs of {', '.join(kept)}."
            raise
    if not log.exists():
        raise ServerNotFoundError(
            f"The log {log} was removed while its server runs.",
            hint="It begins again when the server is started again: trtserve stop, then trtserve start.",
        )
    return log


def follow_log(log: Path, *, position: int, pause: Callable[[], None]) -> Iterator[str]:
    """Yield what is added to a log after byte `position` until its server has ended."""
    server = recorded_server(log.stem.split("@", maxsplit=1)[0], Store())
    return server_log.follow(log, position=position, ended=lambda: server is None or not server.alive(), pause=pause)


def _not_found(name: str, living: list[Server], store: Store) -> ServerNotFoundError:
    dead = recorded_server(name, store)
    if dead is not None:
        log = dead.instances[0].log
        message = f"The server {name} ended without being stopped. Its last lines:\n{last_lines(log)}"
        if dead.state == "failed" and dead.failure is not None:
            message = f"The server {name} has failed. {dead.failure.message}"
        error = ServerNotFoundError(
            message, hint=f"Start it again: trtserve start --name {name} --model-repository {dead.repository}", log=log
        )
        if dead.state != "failed" and not any(root.alive() or tree(root) for root in dead.roots):
            forget(dead, store, failure=failure_of(error))
        return error
    if living:
        names = ", ".join(server.name for server in living)
        return ServerNotFoundError(
            f"No server {name} is running; running: {names}.",
            hint=f"Name a running server ({names})"
            + (f", or start it: trtserve start {name}" if any(each.name == name for each in store.recorded()) else "."),
        )
    return ServerNotFoundError(f"No server {name} is running, nor any other.", hint=how_to_start(store))


def how_to_start(store: Store) -> str:
    """Return the hint to somebody who needs a running server."""
    text = "Import a model and start it: trtserve import demo && trtserve start --detach"
    if store.recorded():
        text = "Start one: trtserve start --detach"
    return text + searched()


def searched() -> str:
    """Return the end of a hint that says which store was searched; servers of other stores are not listed."""
    home = os.environ.get("TRTSERVE_HOME")
    return f" (only the store of $TRTSERVE_HOME was searched: {home})" if home else ""


def endpoint_of(server: Server, model: str | None = None) -> Endpoint:
    """Return the endpoint of a server, with its default model, its key and its certificate.

    A port for many models speaks HTTP only. `model` is the one of its models that is asked.
    """
    front, seconds = server.endpoint, CONNECT_TIMEOUT
    repository: Path | None = server.repository
    if server.kept is not None:
        model = model or (next(iter(server.kept)) if len(server.kept) == 1 else None)
        imported = [Path(each.repository) for each in Store().recorded() if each.name == model]
        repository, seconds = next(iter(imported), None), _LOADED_WITHIN
    endpoint = Endpoint(
        host=front.host,
        http_port=front.http_port,
        grpc_port=front.grpc_port,
        model=server.model or model,
        repository=repository,
        connect_timeout=seconds,
    )
    return protected(endpoint, server)


def protected(endpoint: Endpoint, server: Server) -> Endpoint:
    """Return the endpoint with the key and the certificate of a server that this user has started."""
    gateway = server.gateway
    if gateway is None or not gateway.settings.is_file():
        return endpoint
    from trtserve.gateway.settings import GatewaySettings

    settings = GatewaySettings.read(gateway.settings)
    # The gateway of many models has no server of its own, but a key and a certificate.
    own = replace(settings, own=settings.own or server.kept is not None).endpoint
    return replace(endpoint, tls=own.tls, api_key=own.api_key)

"""The doors of a server: one process in front of each instance's HTTP service, and the rules for exposing it."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path

from trtserve.errors import PortInUseError, ServerStartError, UsageError
from trtserve.files import writing
from trtserve.gateway.settings import (
    MIB,
    DoorSettings,
    Limits,
    certificate_name,
    read_key,
    require_key,
    write_private,
)
from trtserve.host.ports import free_ports, taken_meanwhile
from trtserve.process import (
    Command,
    ProcessId,
    exit_code,
    spawn,
    was_killed,
)
from trtserve.repository.profiles import CORE
from trtserve.repository.served import ServedRepository
from trtserve.server.state import (
    DoorState,
    door_folder,
    log_file,
    run_folder,
)
from trtserve.server.triton.server_log import last_lines
from trtserve.server.triton.tritonserver import LOOPBACK, Address, client_host
from trtserve.specs import ServerSpec
from trtserve.store import Store

_LISTEN_TIMEOUT = 20.0
_POLL = 0.05


@dataclass(frozen=True, kw_only=True)
class DoorPlan:
    """A door before it runs."""

    settings: DoorSettings
    file: Path
    """Where the settings are written."""
    log: Path
    key: str | None = field(default=None, repr=False)
    """API key that is written to the settings' key file, or None when the user has such a file."""

    @property
    def command(self) -> Command:
        """The command that runs it, in a folder without other modules, which Python would import from there."""
        return Command(argv=(sys.executable, "-m", "trtserve.gateway", str(self.file)), cwd=self.file.parent)


def require_protected(spec: ServerSpec, address: str) -> None:
    """Raise UsageError for a server that anyone may use or listen to, at an address that other machines can reach."""
    if spec.no_auth or is_loopback(address):
        return
    if spec.raw_http:
        raise UsageError(
            f"--raw-http on {spec.host} lets everyone on the network crash this server.",
            hint="Leave --raw-http out, or say with --no-auth that you trust this network.",
        )
    if spec.api_key is None and spec.api_key_file is None:
        raise UsageError(
            f"--host {spec.host} can be reached by other machines, and this server would answer everyone.",
            hint="Give --api-key-file FILE (or TRTSERVE_API_KEY), or say with --no-auth that you trust this network.",
        )
    if spec.tls_certificate is None and not spec.no_tls:
        raise UsageError(
            f"--host {spec.host} can be reached by other machines: the API key and all prompts would be readable.",
            hint="Give --tls-certificate and --tls-key, or --no-tls when a proxy in front encrypts.",
        )


def behind_doors(addresses: Collection[Address]) -> list[Address]:
    """Return the addresses with a port on loopback for each Triton's own HTTP service."""
    inner = free_ports(LOOPBACK, len(addresses))
    return [replace(address, inner_http_port=port) for address, port in zip(addresses, inner, strict=True)]


def plan_door(
    name: str, address: Address, number: int, spec: ServerSpec, served: ServedRepository, repository: Path, store: Store
) -> DoorPlan:
    """Return the door of one instance. Raises UsageError for a key, or a file, that cannot be used."""
    folder = door_folder(name, store)
    key_file = None if spec.api_key_file is None else spec.api_key_file.expanduser().absolute()
    if key_file is not None:
        read_key(key_file)
    elif spec.api_key is not None:
        require_key(spec.api_key)
        key_file = folder / "key"
    certificate, private_key = _absolute(spec.tls_certificate), _absolute(spec.tls_key)
    named = None
    if certificate is not None and private_key is not None:
        named = certificate_name(certificate, private_key)
    host, port = address.triton_http
    settings = DoorSettings(
        name=name,
        host=address.host,
        port=address.http_port,
        triton_http=f"{host}:{port}",
        triton_grpc=f"{client_host(address.host)}:{address.grpc_port}",
        metrics=f"{address.metrics_host}:{address.metrics_port}",
        model=served.model,
        core_models=tuple(core.name for core in served.core_models) or tuple({CORE} & set(served.models)),
        repository=repository.absolute(),
        run_folder=run_folder(name, store),
        ui=spec.ui,
        key_file=key_file,
        certificate=certificate,
        private_key=private_key,
        certificate_name=named,
        open_apis=spec.open_api,
        limits=Limits(
            requests=spec.max_requests,
            request_seconds=spec.request_timeout,
            body_bytes=spec.max_request_mib * MIB,
            json_bytes=min(Limits.json_bytes, spec.max_request_mib * MIB),
            buffered_bytes=max(Limits.buffered_bytes, spec.max_request_mib * MIB),
        ),
    )
    return DoorPlan(
        settings=settings,
        file=folder / f"{number}.json",
        log=log_file(f"{name}@door", store, number),
        key=spec.api_key,
    )


def spawn_door(plan: DoorPlan, triton: ProcessId, *, bound: bool) -> DoorState:
    """Start the process of a door, in front of the Triton that descends from `triton`."""
    folder = plan.file.parent
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if plan.key is not None:
            write_private(folder / "key", plan.key + "\n")
    replace(plan.settings, triton=triton).write(plan.file)
    process = spawn(plan.command, log=plan.log, bound=bound)
    encrypted = plan.settings.certificate is not None
    return DoorState(process=process, log=plan.log, settings=plan.file, encrypted=encrypted)


def wait_until_it_listens(plan: DoorPlan, door: DoorState) -> None:
    """Wait for a door. Raises PortInUseError or ServerStartError when it ends, or does not listen in time."""
    deadline = time.monotonic() + _LISTEN_TIMEOUT
    address = client_host(plan.settings.host), plan.settings.port
    while True:
        if not door.process.alive():
            raise _door_ended(plan, door.process)
        with socket.socket() as probe:
            probe.settimeout(_POLL)
            if probe.connect_ex(address) == 0 and door.process.alive():
                return
        if time.monotonic() > deadline:
            raise ServerStartError(f"The door did not listen within {_LISTEN_TIMEOUT:g} s.", log=plan.log)
        time.sleep(_POLL)


def _door_ended(plan: DoorPlan, identity: ProcessId) -> PortInUseError | ServerStartError:
    lines = last_lines(plan.log)
    if exit_code(identity) == PortInUseError.code:
        return PortInUseError(
            f"The HTTP port {plan.settings.port} cannot be opened:\n{lines}", hint=taken_meanwhile("--http-port")
        )
    error = ServerStartError(f"The door, which answers HTTP requests, has ended. Last lines:\n{lines}", log=plan.log)
    error.killed = was_killed(exit_code(identity))
    return error


def is_loopback(address: str) -> bool:
    """Return whether only this machine can connect to a server at an IPv4 address."""
    return ip_address(address).is_loopback


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()

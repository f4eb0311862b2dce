"""What answers clients in front of the Tritons of a server: a gateway for each, and one more for several."""

from __future__ import annotations

import secrets
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path

from trtserve.client.endpoint import Tls
from trtserve.errors import PortInUseError, ServerStartError, UsageError
from trtserve.files import writing
from trtserve.gateway.settings import (
    MIB,
    GatewaySettings,
    RequestLimits,
    certificate_name,
    read_key,
    require_key,
    write_private,
)
from trtserve.host.ports import taken_meanwhile
from trtserve.process import Command, ProcessId, exit_code, spawn, was_killed
from trtserve.repository.profiles import CORE, MODELS
from trtserve.repository.served import ServedRepository
from trtserve.server.state import GatewayState, gateway_folder, log_file, run_folder
from trtserve.server.triton.server_log import last_lines
from trtserve.server.triton.tritonserver import Address, client_host
from trtserve.specs import ServerSpec
from trtserve.specs.command_line import given_values, option_words
from trtserve.store import Store

_LISTEN_TIMEOUT = 20.0
_POLL = 0.05


@dataclass(frozen=True, kw_only=True)
class GatewayPlan:
    settings: GatewaySettings
    file: Path  # where the settings are written
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


def plan_gateway(
    name: str, address: Address, number: int, spec: ServerSpec, served: ServedRepository, repository: Path, store: Store
) -> GatewayPlan:
    """Return the gateway of one instance. Raises UsageError for a key, or a file, that cannot be used."""
    folder = gateway_folder(name, store)
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
    settings = GatewaySettings(
        name=name,
        host=address.host,
        port=address.http_port,
        triton_http=f"{host}:{port}",
        triton_secret=address.inner_secret,
        triton_grpc=f"{client_host(address.host)}:{address.grpc_port}",
        metrics=f"{address.metrics_host}:{address.metrics_port}",
        model=served.model,
        core_models=tuple(core.name for core in served.core_models) or tuple({CORE} & set(served.models)),
        repository=repository.absolute(),
        run_folder=run_folder(name, store),
        ui=spec.ui,
        start_again=_start_again(name, spec, served),
        key_file=key_file,
        certificate=certificate,
        private_key=private_key,
        certificate_name=named,
        allow_origins=spec.allow_origin,
        image_folder=_absolute(spec.image_folder),
        image_hosts=spec.image_host,
        open_apis=spec.open_api,
        admin_key_file=folder / f"{number}.admin-key",
        processes=spec.gateway_processes,
        request_log=_absolute(spec.request_log),
        request_log_texts=spec.request_log_texts,
        limits=RequestLimits(
            requests=spec.max_requests,
            request_seconds=spec.request_timeout,
            body_bytes=spec.max_request_mib * MIB,
            json_bytes=min(RequestLimits.json_bytes, spec.max_request_mib * MIB),
            buffered_bytes=max(RequestLimits.buffered_bytes, spec.max_request_mib * MIB),
        ),
    )
    return GatewayPlan(
        settings=settings,
        file=folder / f"{number}.json",
        log=log_file(f"{name}@gateway", store, number),
        key=spec.api_key,
    )


def _start_again(name: str, spec: ServerSpec, served: ServedRepository) -> str:
    """Return the command that starts a server with its page again; everyone sees it, so it has no path."""
    named = [] if served.model == name else ["--name", name]
    model = [*(["--model-repository", "FOLDER"] if served.model in MODELS else [served.model]), *named]
    given = given_values(spec)
    files = ("api_key_file", "tls_certificate", "tls_key")
    kept = {each: value for each, value in given.items() if each in ("host", "http_port", "grpc_port", "metrics_port")}
    kept |= {each: "FILE" for each in files if each in given or (each == "api_key_file" and spec.has_key)}
    kept |= {each: given[each] for each in ("instances", "proxy_port") if each in given}
    return " ".join(["trtserve start", *map(shlex.quote, model), "--detach --ui", *option_words(kept)])


def plan_front(
    name: str, addresses: Sequence[Address], spec: ServerSpec, served: ServedRepository, repository: Path, store: Store
) -> GatewayPlan | None:
    """Return the gateway in front of several instances, which answers at `--proxy-port`; None for one instance.

    Raises UsageError when its ports are also an instance's.
    """
    if len(addresses) == 1:
        return None
    used = {port for address in addresses for port in address.ports.values()}
    http_port, grpc_port = spec.proxy_port, spec.proxy_port + 1
    if not used.isdisjoint((http_port, grpc_port)):
        raise UsageError(
            f"--proxy-port {http_port} (and {grpc_port} for gRPC) is also a port of an instance.",
            hint=f"Choose --proxy-port {max(used) + 1}.",
        )
    plan = plan_gateway(name, addresses[0], 0, spec, served, repository, store)
    own, host = plan.settings, client_host(addresses[0].host)
    tls = None
    if own.certificate is not None and not spec.raw_http:
        tls = Tls(root_certificates=own.certificate, server_name=own.certificate_name)
    settings = replace(
        own,
        port=http_port,
        grpc_front_port=grpc_port,
        triton_http=f"{host}:{addresses[0].http_port}",
        triton_secret=None,
        replicas=tuple(f"{host}:{each.grpc_port}:{each.http_port}" for each in addresses[1:]),
        core_models=(),
        own=False,
        servers_key_file=own.key_file,
        servers_tls=tls,
    )
    return replace(plan, settings=settings, log=log_file(f"{name}@proxy", store))


def write_settings(plan: GatewayPlan, triton: ProcessId | None, python_models: tuple[str, ...] = ()) -> None:
    """Write what a gateway reads, in front of the Triton that descends from `triton`, or of several."""
    folder = plan.file.parent
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if plan.key is not None:
            write_private(folder / "key", plan.key + "\n")
        if plan.settings.admin_key_file is not None:
            write_private(plan.settings.admin_key_file, secrets.token_urlsafe(32) + "\n")
    replace(plan.settings, triton=triton, python_models=python_models).write(plan.file)


def spawn_gateway(
    plan: GatewayPlan, triton: ProcessId | None, python_models: tuple[str, ...] = (), *, bound: bool
) -> GatewayState:
    """Start the process of a gateway, in front of the Triton that descends from `triton`, or of several.

    `python_models` are the models whose stubs must be below `triton`, each as often as it has stubs.
    """
    write_settings(plan, triton, python_models)
    process = spawn(plan.command, log=plan.log, bound=bound, private=True)
    encrypted = plan.settings.certificate is not None
    return GatewayState(process=process, log=plan.log, settings=plan.file, encrypted=encrypted)


def await_gateway(plan: GatewayPlan, gateway: GatewayState) -> None:
    """Wait for a gateway. Raises PortInUseError or ServerStartError when it ends, or does not listen in time."""
    address = client_host(plan.settings.host), plan.settings.port

    def listens() -> bool:
        if exit_code(gateway.process) == PortInUseError.code:
            raise PortInUseError(
                f"The HTTP port {address[1]} cannot be opened:\n{last_lines(plan.log)}",
                hint=taken_meanwhile("--http-port"),
            )
        if not gateway.process.alive():
            raise gateway_ended(gateway.process, plan.log)
        with socket.socket() as probe:
            probe.settimeout(_POLL)
            return probe.connect_ex(address) == 0 and gateway.process.alive()

    deadline = time.monotonic() + _LISTEN_TIMEOUT
    while not listens():
        if time.monotonic() > deadline:
            raise ServerStartError(f"The gateway did not listen within {_LISTEN_TIMEOUT:g} s.", log=plan.log)
        time.sleep(_POLL)


def gateway_ended(process: ProcessId, log: Path) -> ServerStartError:
    return ServerStartError(
        f"The gateway, which answers HTTP requests, has ended. Last lines:\n{last_lines(log)}",
        log=log,
        killed=was_killed(exit_code(process)),
    )


def is_loopback(address: str) -> bool:
    """Return whether only this machine can connect to a server at an IPv4 address."""
    return ip_address(address).is_loopback


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()

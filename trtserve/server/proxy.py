"""The reverse proxy in front of several instances: nginx with a configuration of its own, as one endpoint for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtserve.errors import PortInUseError, ServerStartError, UsageError
from trtserve.files import writing
from trtserve.host.ports import taken_meanwhile
from trtserve.process import (
    Command,
    ProcessId,
    find_sbin_program,
    run,
    spawn,
    stop,
)
from trtserve.server.render import render
from trtserve.server.state import ProxyState, log_file
from trtserve.server.triton import server_log
from trtserve.server.triton.server_log import indented
from trtserve.server.triton.tritonserver import Address, client_host
from trtserve.specs import ServerSpec
from trtserve.store import Store

NGINX = "nginx"
_CHECK_TIMEOUT = 30.0
_LISTEN_TIMEOUT = 20.0
_POLL = 0.05
_LAST_LINES = 5


@dataclass(frozen=True, kw_only=True)
class ProxyPlan:
    """A reverse proxy before it runs."""

    file: Path
    """The configuration; nginx keeps its working files next to it."""
    content: str
    log: Path
    host: str
    http_port: int
    grpc_port: int
    executable: Path | None
    """nginx, or None when it is not installed."""

    @property
    def command(self) -> Command:
        """The command that runs it."""
        name = NGINX if self.executable is None else str(self.executable)
        return Command(argv=(name, "-e", "stderr", "-p", str(self.file.parent), "-c", str(self.file)))


def plan_proxy(name: str, addresses: Sequence[Address], spec: ServerSpec, store: Store) -> ProxyPlan:
    """Return the proxy of the instances at `addresses`. Raises UsageError when its ports are also an instance's."""
    used = {port for address in addresses for port in address.ports.values()}
    http_port, grpc_port = spec.proxy_port, spec.proxy_port + 1
    if not used.isdisjoint((http_port, grpc_port)):
        raise UsageError(
            f"--proxy-port {http_port} (and {grpc_port} for gRPC) is also a port of an instance.",
            hint=f"Choose --proxy-port {max(used) + 1}.",
        )
    file = store.servers / f"{name}.proxy" / "nginx.conf"
    return ProxyPlan(
        file=file,
        content=proxy_config(addresses, file=file, http_port=http_port, grpc_port=grpc_port),
        log=log_file(f"{name}@proxy", store),
        host=addresses[0].host,
        http_port=http_port,
        grpc_port=grpc_port,
        executable=find_sbin_program(NGINX),
    )


def proxy_config(addresses: Sequence[Address], *, file: Path, http_port: int, grpc_port: int) -> str:
    """Return a configuration of nginx, for `file`, that needs no root: one HTTP and one gRPC port for all instances."""
    return render(
        "nginx.conf.j2",
        folder=str(file.parent),
        host=addresses[0].host,
        http_port=http_port,
        grpc_port=grpc_port,
        instances=[
            {"host": client_host(each.host), "http_port": each.http_port, "grpc_port": each.grpc_port}
            for each in addresses
        ],
    )


def write_proxy(proxy: ProxyPlan) -> None:
    """Write the configuration and have nginx check it, if it is installed.

    Raises ServerStartError with its complaints.
    """
    with writing(proxy.file):
        proxy.file.parent.mkdir(parents=True, exist_ok=True)
        proxy.file.write_text(proxy.content, encoding="utf-8")
    if proxy.executable is None:
        return
    try:
        checked = run(Command(argv=(*proxy.command.argv, "-t")), timeout=_CHECK_TIMEOUT)
    except TimeoutError as error:
        raise ServerStartError(
            f"nginx did not read its configuration, {proxy.file}: {error}", hint="Look at `nginx -t`."
        ) from error
    if checked.code != 0:
        lines = indented(checked.stderr.splitlines()[-_LAST_LINES:])
        raise ServerStartError(f"nginx refuses its configuration, {proxy.file}:\n{lines}")


def start_proxy(proxy: ProxyPlan, *, bound: bool) -> ProxyState:
    """Run nginx until it listens; without nginx, return its ports without a process.

    Raises PortInUseError when a port was taken in the meantime and ServerStartError when nginx ends for another reason.
    """
    identity = None
    if proxy.executable is not None:
        identity = spawn(proxy.command, log=proxy.log, bound=bound)
        try:
            _wait_until_it_listens(proxy, identity)
        except BaseException:
            stop(identity, grace=_POLL)
            raise
    return ProxyState(
        file=proxy.file, log=proxy.log, http_port=proxy.http_port, grpc_port=proxy.grpc_port, process=identity
    )


def _wait_until_it_listens(proxy: ProxyPlan, identity: ProcessId) -> None:
    """nginx opens its ports and then writes its process id."""
    deadline = time.monotonic() + _LISTEN_TIMEOUT
    pid = proxy.file.parent / "pid"
    while not (pid.is_file() and pid.read_text(encoding="utf-8").strip() == str(identity.pid)):
        text = server_log.read(proxy.log)
        if "Address already in use" in text:  # nginx would try again for some seconds
            raise PortInUseError(
                f"The reverse proxy cannot listen:\n{indented(text.splitlines()[:2])}",
                hint=taken_meanwhile("another --proxy-port"),
            )
        if not identity.alive():
            lines = indented(text.splitlines()[-_LAST_LINES:]) or "  (nothing was written)"
            raise ServerStartError(f"The reverse proxy (nginx) has ended. Last lines:\n{lines}", log=proxy.log)
        if time.monotonic() > deadline:
            raise ServerStartError(f"nginx did not listen within {_LISTEN_TIMEOUT:g} s.", log=proxy.log)
        time.sleep(_POLL)

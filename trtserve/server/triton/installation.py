"""Where tritonserver is installed, and the folders that its Python stub needs."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from trtserve.errors import MissingDependencyError, RepositoryError
from trtserve.executor.vllm import arguments
from trtserve.files import writing
from trtserve.host.machine import install_command
from trtserve.process import program
from trtserve.store import Store

_SYSTEM_ROOT = Path("/opt/tritonserver")
_STUB, _BACKEND = "triton_python_backend_stub", "libtriton_python.so"
_LIBRARIES = "nvidia_pytriton.libs"
# Triton's Python backend starts each stub by an unquoted line of bash, and the stub reads only ASCII paths, in any
# locale (seen on Triton 24.10). A link helps against the former, not against the latter.
ALLOWED_CHARACTERS = "ASCII letters, digits and . _ - only"
_ALLOWED = re.compile(r"[A-Za-z0-9_./+,:@%=-]")


@dataclass(frozen=True, kw_only=True)
class Triton:
    executable: Path
    backends: Path  # folder with one folder per backend
    package: Path | None = None
    """Folder of the nvidia-pytriton wheel, or None for a system installation.

    The wheel has one Python stub per minor version, so `prepare_backends` must put one into a backend folder.
    """

    def has(self, backend: str) -> bool:
        """Return whether it has a backend; `prepare_backends` adds one of ours to the wheel."""
        return (self.backends / backend).is_dir() or (self.package is not None and backend == arguments.BACKEND)

    @property
    def stub(self) -> Path | None:
        """The Python stub for the running interpreter, or None when its minor version has none."""
        if self.package is None:
            stub = self.backends / "python" / _STUB
        else:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            stub = self.package / "python_backend_stubs" / version / _STUB
        return stub if stub.exists() else None


# Its place in NVIDIA's containers.
CONTAINER_TRITON = Triton(executable=_SYSTEM_ROOT / "bin" / "tritonserver", backends=_SYSTEM_ROOT / "backends")


def installed() -> list[Triton]:
    """Return every tritonserver: that of the nvidia-pytriton wheel, on PATH, and in /opt/tritonserver."""
    places = (_from_wheel(), _from_root(program("tritonserver")), _from_root(_SYSTEM_ROOT / "bin" / "tritonserver"))
    return list(dict.fromkeys(triton for triton in places if triton is not None))


def find_triton(backends: frozenset[str] = frozenset({"python"}), *, system_first: bool = False) -> Triton:
    """Return the first tritonserver with all `backends`. Raises MissingDependencyError when there is none.

    `system_first` puts that of the nvidia-pytriton wheel last, because models that import tensorrt_llm need the Python
    of the container's own server.
    """
    found = sorted(installed(), key=lambda triton: system_first and triton.package is not None)
    if not found:
        raise MissingDependencyError(
            "No tritonserver was found: not in the package nvidia-pytriton, on PATH, or in /opt/tritonserver.",
            hint=f"Install the package: {install_command('cpu')}",
        )
    lacking = {triton: sorted(name for name in backends if not triton.has(name)) for triton in found}
    for triton, names in lacking.items():
        if not names:
            return triton
    raise MissingDependencyError(
        f"{found[0].executable} has no backend {', '.join(lacking[found[0]])}, which models of this repository need.",
        hint="Serve this repository in NVIDIA's Triton container, or build it for the openvino runtime.",
    )


def prepare_backends(triton: Triton, store: Store) -> Path:
    """Return the folder for `--backend-directory`: links in the store for the wheel, else the installation's own.

    The stub must be a link, because it finds its shared libraries relative to its real path. The backend must be a
    file: Triton loads none from elsewhere for another backend in Python, such as `vllm`.
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
    with writing(folder):
        for source in (*(triton.backends / "python").iterdir(), stub):
            if source.is_file():
                _link(source, folder / "python" / source.name, copied=source.name == _BACKEND)
        _link(triton.package.parents[1] / _LIBRARIES, folder.parents[2] / _LIBRARIES)
        _link(Path(arguments.__file__).with_name("nvidia_backend.py"), folder / arguments.BACKEND / "model.py")
    return folder


def backend_folder(triton: Triton, store: Store) -> Path:
    """Return the folder that `prepare_backends` returns."""
    if triton.package is None:
        return triton.backends
    key = hashlib.sha256(str(triton.package).encode()).hexdigest()[:8]
    own = store.root / "backends" / f"python{sys.version_info.major}.{sys.version_info.minor}-{key}"
    return own.joinpath(*triton.backends.parts[-3:])  # as deep as in the wheel, from where it looks for its libraries


def stub_path_fault(path: Path) -> str | None:
    """Explain why Python models below `path` cannot be started, or return None."""
    refused = {character for character in str(path.resolve()) if not character.isascii()}
    refused |= {character for character in str(path) if not _ALLOWED.fullmatch(character)}
    if not refused:
        return None
    found = " and ".join(map(repr, sorted(refused)))
    return f"Triton's Python backend cannot start models from {path.resolve()}: the path contains {found}"


def require_stub_path(repository: Path) -> None:
    """Raise RepositoryError for a repository in a folder from which Triton cannot start Python models."""
    if fault := stub_path_fault(repository):
        raise RepositoryError(
            f"{fault}.",
            hint=f"Move it to a folder whose path has {ALLOWED_CHARACTERS}, and start it with --model-repo; "
            "for imports, set TRTSERVE_HOME to such a folder.",
        )


def _from_wheel() -> Triton | None:
    """Find the wheel without importing it: its Python API starts processes and needs more packages."""
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


def _link(source: Path, target: Path, *, copied: bool = False) -> None:
    """Make `target` a link to `source`, or a copy, in one rename: a starting server never sees it incomplete."""
    if target.is_symlink() and target.readlink() == source:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Unique per thread, because threads start servers too.
    staged = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if copied:
            shutil.copyfile(source, staged)
        else:
            staged.symlink_to(source)
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)

"""The tritonserver of the wheel and the Python that its stub takes: what is silent or cryptic when it does not fit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.artifacts import fingerprint
from trtserve.doctor.findings import OPENVINO, Finding, Group, State
from trtserve.errors import MissingDependencyError
from trtserve.files import write_json
from trtserve.process import Command, run
from trtserve.store import Store
from trtserve.triton import server as triton_server
from trtserve.triton.probe import round_trip
from trtserve.triton.stub_paths import WANTED, is_fit, unfit

INSTALL = "pip install 'trtserve[cpu]'"
_PYTHON_FACTS = (
    "import json, sys, importlib.metadata as m\n"
    "try: n = m.version('numpy')\n"
    "except m.PackageNotFoundError: n = None\n"
    "print(json.dumps({'version': list(sys.version_info[:2]), 'prefix': sys.prefix, 'numpy': n}))"
)
_GROUPS: dict[str, Group] = {"libpython": "python", "python3": "python", "numpy": "python"}


def _finding(name: str, state: State, evidence: str, fix: str = "") -> Finding:
    group = _GROUPS.get(name, "triton")
    return Finding(group=group, name=name, state=state, evidence=evidence, fix=fix, needed_by=OPENVINO)


def quick_checks() -> list[Finding]:
    """All of them but the round trip: a fraction of a second."""
    facts = _stub_python()
    return [check_triton(), check_stub(), check_libpython(), check_python(facts), check_numpy(facts)]


def check_triton() -> Finding:
    """A tritonserver with the python backend."""
    try:
        triton = triton_server.find_triton()
    except MissingDependencyError as error:
        return _finding("tritonserver", "failed", error.message.rstrip("."), fix=error.hint or "")
    return _finding("tritonserver", "ok", str(triton.executable))


def check_stub() -> Finding:
    """The program that runs model.py is made for one minor version of Python."""
    triton = next(iter(triton_server.installed()), None)
    if triton is None:
        return _finding("stub", "failed", "none: it is a part of tritonserver", fix=check_triton().fix)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if triton.stub is None:
        return _finding("stub", "failed", f"none for Python {version}", fix="Use Python 3.10, 3.11 or 3.12.")
    return _finding("stub", "ok", f"for Python {version}")


def check_libpython() -> Finding:
    """The stub links libpython dynamically; without it every model fails with an empty error."""
    name = str(sysconfig.get_config_var("INSTSONAME") or "")
    folder = Path(str(sysconfig.get_config_var("LIBDIR")))
    shared = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    if (folder / shared).exists():
        return _finding("libpython", "ok", str(folder / shared))
    if shared in _linker_cache():
        return _finding("libpython", "ok", f"{shared} (linker cache)")
    return _finding(
        "libpython",
        "failed",
        f"{shared} is neither in {folder} nor known to the linker (this Python is built as {name or 'static'})",
        fix=f"Debian: apt-get install libpython{sys.version_info.major}.{sys.version_info.minor}; "
        "pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared.",
    )


def check_python(facts: Mapping[str, Any]) -> Finding:
    """The stub ignores PYTHONPATH and takes the environment of the first `python3` on PATH."""
    wanted = {"version": list(sys.version_info[:2]), "prefix": sys.prefix}
    if not facts:
        found = "no python3 in this environment's bin folder or on PATH"
    elif all(facts[key] == value for key, value in wanted.items()):
        return _finding("python3", "ok", sys.prefix)
    else:
        found = (
            f"the stub would take Python {'.'.join(map(str, facts['version']))} of {facts['prefix']}, not {sys.prefix}"
        )
    return _finding(
        "python3",
        "failed",
        found,
        fix=f"Install trtserve in a virtual environment (python3 -m venv .venv; {INSTALL}).",
    )


def check_numpy(facts: Mapping[str, Any]) -> Finding:
    """With NumPy 2 the stub of Triton 2.51 reads every element of a numeric input as the first one, silently."""
    version = facts.get("numpy")
    if version is None:
        return _finding("numpy", "failed", "not installed for the stub", fix=f"{INSTALL}")
    fits = int(str(version).split(".")[0]) < 2
    return _finding(
        "numpy",
        "ok" if fits else "failed",
        str(version) if fits else f"{version}: Triton's stub reads inputs wrongly with NumPy 2",
        fix="" if fits else "pip install 'numpy>=1.26,<2'",
    )


def check_store(store: Store) -> Finding:
    """Triton's backend folder lies in the store, and so do the repositories of imports."""
    if is_fit(store.root):
        return _finding("store", "ok", str(store.root))
    return _finding(
        "store",
        "failed",
        unfit(store.root),
        fix=f"Set TRTSERVE_HOME to a folder whose path has {WANTED}.",
    )


def has_triton() -> bool:
    """Whether there is a tritonserver, of whatever origin."""
    return bool(triton_server.installed())


def check_round_trip(store: Store, *, system_first: bool = False) -> Finding:
    """Strings and integers through a real Triton and its stub, there and back; remembered when it passes.

    `system_first` takes a container's own server where there is one.
    """
    triton = triton_server.find_triton(system_first=system_first)
    with tempfile.TemporaryDirectory(prefix="trtserve-doctor-") as folder:
        problem = round_trip(Path(folder), store, triton)
    if problem:
        return _finding("round trip", "failed", problem, fix=f"Install anew: {INSTALL}.")
    if triton == triton_server.find_triton():
        write_json(_passed_file(store), {"passed": True})
    return _finding("round trip", "ok", "strings and integers came back through Triton")


def passed_before(store: Store) -> bool:
    return _passed_file(store).exists()


def _passed_file(store: Store) -> Path:
    """The record of a round trip, named by everything that decides its outcome."""
    executable = triton_server.find_triton().executable
    stat = executable.stat()
    triton = (str(executable), stat.st_size, stat.st_mtime_ns)
    key = fingerprint(python=sys.version, prefix=sys.prefix, triton=triton, libc=platform.libc_ver(), tools=_versions())
    return store.root / "doctor" / f"{key[:16]}.json"


def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in ("numpy", "nvidia-pytriton")}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stub_python() -> Mapping[str, Any]:
    """Version, prefix and NumPy of the Python that the stub takes; empty when it cannot be run."""
    command = Command(argv=("python3", "-c", _PYTHON_FACTS), env=triton_server.stub_environment())
    try:
        ended = run(command, timeout=20)
    except (MissingDependencyError, TimeoutError):
        return {}
    facts = json.loads(ended.stdout) if ended.code == 0 else {}
    return facts if isinstance(facts, dict) else {}


def _linker_cache() -> str:
    """What the dynamic linker knows; ldconfig is outside PATH for ordinary users on Debian."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/sbin", "/usr/sbin"))
    try:
        return run(Command(argv=("ldconfig", "-p"), env={"PATH": path}), timeout=20).stdout
    except (MissingDependencyError, TimeoutError):
        return ""

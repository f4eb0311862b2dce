"""What this machine must have before a server starts: the things whose lack is silent or cryptic later."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtserve.artifacts import fingerprint
from trtserve.errors import MachineError, MissingDependencyError
from trtserve.machine import free_memory, gibibytes
from trtserve.ports import is_free, owner
from trtserve.process import Command, run
from trtserve.progress import SILENT, Progress
from trtserve.store import Store, write_json
from trtserve.triton import server as triton_server
from trtserve.triton.probe import round_trip

Result = Literal["ok", "warning", "failed"]

MINIMUM_GLIBC = (2, 35)
MINIMUM_SHARED_MEMORY = 32 * 2**20
MINIMUM_MEMORY = 2**30
INSTALL = "pip install 'trtserve[cpu]'"
_PYTHON_FACTS = (
    "import json, sys, importlib.metadata as m\n"
    "try: n = m.version('numpy')\n"
    "except m.PackageNotFoundError: n = None\n"
    "print(json.dumps({'version': list(sys.version_info[:2]), 'prefix': sys.prefix, 'numpy': n}))"
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing looked at: what was found, and what to do when that is not enough."""

    name: str
    result: Result
    found: str
    fix: str = ""


def examine(
    *, store: Store | None = None, address: triton_server.Address | None = None, progress: Progress = SILENT
) -> list[Check]:
    """Every check, the round trip through a real Triton included (again, also when it passed before)."""
    store = store or Store()
    checks = [*quick_checks(), check_memory(MINIMUM_MEMORY)]
    if address is not None:
        checks.append(check_ports(address))
    if not failed(checks):
        progress.step("Starting Triton with a model that returns its input …")
        checks.append(check_round_trip(store))
    return checks


def require_machine(store: Store, *, progress: Progress = SILENT) -> None:
    """The checks of `start`: all cheap ones, and the round trip once per environment.

    MachineError with every failed check and its fix; warnings go to `progress`.
    """
    checks = quick_checks()
    if not failed(checks) and not _passed_before(store):
        progress.step("First start in this environment: one round trip through Triton …")
        checks.append(check_round_trip(store))
    for check in checks:
        if check.result == "warning":
            progress.warn(f"{check.name}: {check.found}. {check.fix}")
    raise_failed(checks)


def raise_failed(checks: list[Check]) -> None:
    """MachineError when a check has failed."""
    wrong = failed(checks)
    if wrong:
        raise MachineError(
            "This machine cannot run the server: " + "; ".join(f"{check.name}: {check.found}" for check in wrong) + ".",
            # A line for each, so that a command can be copied; one command may mend several things.
            hint="\n".join(dict.fromkeys(check.fix for check in wrong)),
        )


def failed(checks: list[Check]) -> list[Check]:
    """Those that forbid a start."""
    return [check for check in checks if check.result == "failed"]


def quick_checks() -> list[Check]:
    """Everything that needs no server: a fraction of a second."""
    facts = _stub_python()
    return [
        check_glibc(platform.libc_ver()),
        check_triton(),
        check_stub(),
        check_libpython(),
        check_python(facts),
        check_numpy(facts),
        check_shared_memory(triton_server.SHARED_MEMORY),
    ]


def check_glibc(version: tuple[str, str]) -> Check:
    """Triton of nvidia-pytriton is linked against glibc 2.35; older ones fail with a missing symbol."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version[1])[:2])
    fits = version[0] == "glibc" and numbers >= MINIMUM_GLIBC
    return Check(
        name="glibc",
        result="ok" if fits else "failed",
        found=" ".join(version).strip() or "no glibc",
        fix="" if fits else "Use a system with glibc 2.35 or newer, such as Ubuntu 22.04 or Debian 12.",
    )


def check_triton() -> Check:
    """A tritonserver with the python backend."""
    try:
        triton = triton_server.find_triton()
    except MissingDependencyError as error:
        return Check(name="tritonserver", result="failed", found=error.message.rstrip("."), fix=error.hint or "")
    return Check(name="tritonserver", result="ok", found=str(triton.executable))


def check_stub() -> Check:
    """The program that runs model.py is made for one minor version of Python."""
    triton = next(iter(triton_server.installed()), None)
    if triton is None:
        return Check(name="stub", result="failed", found="none: it is a part of tritonserver", fix=check_triton().fix)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if triton.stub is None:
        return Check(
            name="stub", result="failed", found=f"none for Python {version}", fix="Use Python 3.10, 3.11 or 3.12."
        )
    return Check(name="stub", result="ok", found=f"for Python {version}")


def check_libpython() -> Check:
    """The stub links libpython dynamically; without it every model fails with an empty error."""
    name = str(sysconfig.get_config_var("INSTSONAME") or "")
    folder = Path(str(sysconfig.get_config_var("LIBDIR")))
    shared = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    if (folder / shared).exists():
        return Check(name="libpython", result="ok", found=str(folder / shared))
    if shared in _linker_cache():
        return Check(name="libpython", result="ok", found=f"{shared} (linker cache)")
    return Check(
        name="libpython",
        result="failed",
        found=f"{shared} is neither in {folder} nor known to the linker (this Python is built as {name or 'static'})",
        fix=f"Debian: apt-get install libpython{sys.version_info.major}.{sys.version_info.minor}; "
        "pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared.",
    )


def check_python(facts: Mapping[str, Any]) -> Check:
    """The stub ignores PYTHONPATH and takes the environment of the first `python3` on PATH."""
    wanted = {"version": list(sys.version_info[:2]), "prefix": sys.prefix}
    if not facts:
        found = "no python3 in this environment's bin folder or on PATH"
    elif all(facts[key] == value for key, value in wanted.items()):
        return Check(name="python3", result="ok", found=sys.prefix)
    else:
        found = (
            f"the stub would take Python {'.'.join(map(str, facts['version']))} of {facts['prefix']}, not {sys.prefix}"
        )
    return Check(
        name="python3",
        result="failed",
        found=found,
        fix=f"Install trtserve in a virtual environment (python3 -m venv .venv; {INSTALL}).",
    )


def check_numpy(facts: Mapping[str, Any]) -> Check:
    """With NumPy 2 the stub of Triton 2.51 reads every element of a numeric input as the first one, silently."""
    version = facts.get("numpy")
    if version is None:
        return Check(name="numpy", result="failed", found="not installed for the stub", fix=f"{INSTALL}")
    fits = int(str(version).split(".")[0]) < 2
    return Check(
        name="numpy",
        result="ok" if fits else "failed",
        found=str(version) if fits else f"{version}: Triton's stub reads inputs wrongly with NumPy 2",
        fix="" if fits else "pip install 'numpy>=1.26,<2'",
    )


def check_shared_memory(folder: Path, *, least: int = MINIMUM_SHARED_MEMORY) -> Check:
    """Each Python model needs at least 1 MiB there, more for large tensors; `least` bytes must be free."""
    fix = "In Docker: --shm-size=1g."
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Check(name="shared memory", result="failed", found=f"{folder} cannot be written", fix=fix)
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    fits = free >= least
    return Check(
        name="shared memory",
        result="ok" if fits else "failed",
        found=f"{gibibytes(free)} free in {folder}" + ("" if fits else f"; {gibibytes(least)} needed"),
        fix="" if fits else fix,
    )


def check_memory(wanted: int, *, least: int = 0) -> Check:
    """Free memory against `wanted` bytes (a warning) and `least` (without them nothing can work)."""
    free = free_memory()
    result: Result = "failed" if free < least else "warning" if free < wanted else "ok"
    found = f"{gibibytes(free)} free" + ("" if result == "ok" else f"; about {gibibytes(max(wanted, least))} needed")
    fix = "Close other programs, or build a smaller engine (`trtserve import --quantize int8`)."
    return Check(name="memory", result=result, found=found, fix="" if result == "ok" else fix)


def check_ports(address: triton_server.Address) -> Check:
    """Whether the default ports are free; taken ones are a warning, since `start` takes flags."""
    numbers = tuple(address.ports.values())
    taken = [port for port in numbers if not is_free(address.host, port)]
    if not taken:
        return Check(name="ports", result="ok", found=f"{', '.join(map(str, numbers))} are free")
    owners = "; ".join(f"{port} is taken by {owner(port)[1] or 'another process'}" for port in taken)
    return Check(name="ports", result="warning", found=owners, fix="Use `trtserve start --auto-ports`.")


def check_round_trip(store: Store) -> Check:
    """Strings and integers through a real Triton and its stub, there and back; remembered when it passes."""
    with tempfile.TemporaryDirectory(prefix="trtserve-doctor-") as folder:
        problem = round_trip(Path(folder), store)
    if problem:
        return Check(name="round trip", result="failed", found=problem, fix=f"Install anew: {INSTALL}.")
    write_json(_passed_file(store), {"passed": True})
    return Check(name="round trip", result="ok", found="strings and integers came back through Triton")


def _passed_before(store: Store) -> bool:
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

"""The wheel's tritonserver and the Python of its stub, whose mismatches fail silently or with cryptic errors."""

from __future__ import annotations

import http.client
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
from trtserve.errors import MissingDependencyError, TrtserveError
from trtserve.files import write_json
from trtserve.host.machine import install_command
from trtserve.host.ports import free_ports
from trtserve.nvidia.releases.converters import EMBEDDED_TAG, known_faults
from trtserve.process import Command, run, spawn
from trtserve.server.doctor import EMBEDDED, CheckResult, report_for
from trtserve.server.launch.commands import LaunchSetup, in_this_python, without_mpi
from trtserve.server.triton import installation
from trtserve.server.triton import tritonserver as triton_server
from trtserve.server.triton.installation import ALLOWED_CHARACTERS, Triton, prepare_backends, stub_path_fault
from trtserve.server.triton.tritonserver import Address, stop_triton, unique_prefix, wait_until_ready
from trtserve.store import Store

_PYTHON_FACTS = (
    "import json, sys, importlib.metadata as m\n"
    "try: n = m.version('numpy')\n"
    "except m.PackageNotFoundError: n = None\n"
    "print(json.dumps({'version': list(sys.version_info[:2]), 'prefix': sys.prefix, 'numpy': n}))"
)


_TRITON = report_for("triton", EMBEDDED)
_PYTHON = report_for("python", EMBEDDED)
_HOST = "127.0.0.1"
_READY_TIMEOUT = 30.0
_MODEL = "probe"
_STRINGS = ["ein", "Wörter", ""]
_INTEGERS = [1, -2, 3]
_CONFIG = """\
name: "probe"
backend: "python"
input [
  { name: "STRINGS" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "INTEGERS" data_type: TYPE_INT32 dims: [ -1 ] }
]
output [
  { name: "STRINGS_BACK" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "INTEGERS_BACK" data_type: TYPE_INT32 dims: [ -1 ] }
]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
_PROGRAM = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        names = ("STRINGS", "INTEGERS")
        arrays = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names]
        tensors = [pb_utils.Tensor(f"{name}_BACK", array) for name, array in zip(names, arrays)]
        return pb_utils.InferenceResponse(tensors)
"""


def quick_checks() -> list[CheckResult]:
    facts = _stub_python()
    return [check_triton(), check_stub(), check_libpython(), check_python(facts), check_numpy(facts)]


def check_triton() -> CheckResult:
    try:
        triton = installation.find_triton()
    except MissingDependencyError as error:
        return _TRITON("tritonserver", "failed", error.message.rstrip("."), error.hint or "")
    return _TRITON("tritonserver", "ok", str(triton.executable))


def check_faults() -> CheckResult:
    """Name the known security faults of the embedded Triton, which `start` therefore keeps behind its gateway."""
    faults = known_faults(EMBEDDED_TAG) if has_triton() else None
    if faults is None:
        return _TRITON("known faults", "ok", "none")
    return _TRITON(
        "known faults",
        "warning",
        faults.rstrip("."),
        "`trtserve start` keeps it behind a gateway: leave --raw-http out, and let only clients whom you trust reach "
        "its gRPC port; on other machines `--container` serves with a newer Triton (`trtserve help security.md`).",
    )


def check_stub() -> CheckResult:
    """Check the stub, which runs model.py and is built for one minor version of Python."""
    triton = next(iter(installation.installed()), None)
    if triton is None:
        return _TRITON("stub", "failed", "none, because tritonserver is missing", check_triton().fix)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if triton.stub is None:
        return _TRITON("stub", "failed", f"none for Python {version}", "Use Python 3.10, 3.11 or 3.12.")
    return _TRITON("stub", "ok", f"for Python {version}")


def check_libpython() -> CheckResult:
    """Check libpython, which the stub links dynamically; without it every model fails with an empty error."""
    name = str(sysconfig.get_config_var("INSTSONAME") or "")
    folder = Path(str(sysconfig.get_config_var("LIBDIR")))
    shared = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    if (folder / shared).exists():
        return _PYTHON("libpython", "ok", str(folder / shared))
    if shared in _linker_cache():
        return _PYTHON("libpython", "ok", f"{shared} (linker cache)")
    return _PYTHON(
        "libpython",
        "failed",
        f"{shared} is neither in {folder} nor found by the linker (this Python is built as {name or 'static'})",
        f"Debian: apt-get install libpython{sys.version_info.major}.{sys.version_info.minor}; "
        "pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared.",
    )


def check_python(facts: Mapping[str, Any]) -> CheckResult:
    """Check the first `python3` on PATH, whose environment the stub uses; it ignores PYTHONPATH."""
    wanted = {"version": list(sys.version_info[:2]), "prefix": sys.prefix}
    if not facts:
        found = "no python3 in this environment's bin folder or on PATH"
    elif all(facts[key] == value for key, value in wanted.items()):
        return _PYTHON("python3", "ok", sys.prefix)
    else:
        found = (
            f"the stub would use Python {'.'.join(map(str, facts['version']))} of {facts['prefix']}, not {sys.prefix}"
        )
    return _PYTHON(
        "python3",
        "failed",
        found,
        f"Install trtserve in a virtual environment (python3 -m venv .venv; {install_command('cpu')}).",
    )


def check_numpy(facts: Mapping[str, Any]) -> CheckResult:
    """Check NumPy: with version 2 the stub of Triton 2.51 silently reads each element of an input as the first one."""
    version = facts.get("numpy")
    if version is None:
        return _PYTHON("numpy", "failed", "not installed for the stub's Python", fix=install_command("cpu"))
    fits = int(str(version).split(".")[0]) < 2
    return _PYTHON(
        "numpy",
        "ok" if fits else "failed",
        str(version) if fits else f"{version}: with NumPy 2 Triton's stub reads inputs wrongly",
        "pip install 'numpy>=1.26,<2'",
    )


def check_store(store: Store) -> CheckResult:
    """Check the path of the store, which holds Triton's backend folder and the repositories of imports."""
    fault = stub_path_fault(store.root)
    fix = f"Set TRTSERVE_HOME to a folder whose path has {ALLOWED_CHARACTERS}."
    return _TRITON("store", "ok" if fault is None else "failed", fault or str(store.root), fix)


def has_triton() -> bool:
    return bool(installation.installed())


def check_round_trip(store: Store, *, system_first: bool = False) -> CheckResult:
    """Send strings and integers through a real Triton and its stub and back; a success is remembered.

    `system_first` prefers a container's own server.
    """
    triton = installation.find_triton(system_first=system_first)
    with tempfile.TemporaryDirectory(prefix="trtserve-doctor-") as folder:
        problem = round_trip(Path(folder), store, triton)
    if problem:
        return _TRITON("round trip", "failed", problem, f"Reinstall: {install_command('cpu')}.")
    if triton == installation.find_triton():
        write_json(passed_file(store), {"passed": True})
    return _TRITON("round trip", "ok", "strings and integers came back through Triton")


def passed_file(store: Store) -> Path:
    """Return the record of a round trip; its name depends on everything that decides the outcome."""
    executable = installation.find_triton().executable
    stat = executable.stat()
    triton = (str(executable), stat.st_size, stat.st_mtime_ns)
    key = fingerprint(
        python=sys.version,
        prefix=sys.prefix,
        triton=triton,
        libc=platform.libc_ver(),
        tools={name: _version(name) for name in ("numpy", "nvidia-pytriton")},
    )
    return store.root / "doctor" / f"{key[:16]}.json"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stub_python() -> Mapping[str, Any]:
    """Return version, prefix and NumPy of the stub's Python, or {} when it cannot be run."""
    command = Command(argv=("python3", "-c", _PYTHON_FACTS), env=triton_server.stub_environment())
    try:
        ended = run(command, timeout=20)
    except (MissingDependencyError, TimeoutError):
        return {}
    facts = json.loads(ended.stdout) if ended.code == 0 else {}
    return facts if isinstance(facts, dict) else {}


def _linker_cache() -> str:
    """Return the linker's cache; on Debian ldconfig is not on the PATH of ordinary users."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/sbin", "/usr/sbin"))
    try:
        return run(Command(argv=("ldconfig", "-p"), env={"PATH": path}), timeout=20).stdout
    except (MissingDependencyError, TimeoutError):
        return ""


def round_trip(folder: Path, store: Store, triton: Triton) -> str:
    """Start `triton` in `folder` with a model that returns its inputs; return what went wrong, or an empty text."""
    repository = write_probe_repository(folder / "repository")
    http_port, grpc_port, metrics_port = free_ports(_HOST, 3)
    address = Address(host=_HOST, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port)
    prefix, log = unique_prefix("doctor"), folder / "triton.log"
    setup = LaunchSetup(executable=str(triton.executable), repository=repository, address=address, shm_prefix=prefix)
    prepare_backends(triton, store)
    identity = spawn(without_mpi(in_this_python(setup, triton, store), _MODEL).command, log=log, bound=True)
    try:
        wait_until_ready(identity, address, log, timeout=_READY_TIMEOUT)
        return _compare(address)
    except (TrtserveError, OSError, http.client.HTTPException) as error:
        return str(error).rstrip(".")
    finally:
        # The model holds nothing that needs an orderly end, which would take Triton four seconds.
        stop_triton([identity], prefix, urgent=lambda: True)


def write_probe_repository(repository: Path) -> Path:
    """Write a repository with one Python model that returns its inputs."""
    program = repository / _MODEL / "1" / "model.py"
    program.parent.mkdir(parents=True)
    program.write_text(_PROGRAM, encoding="utf-8")
    (repository / _MODEL / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
    return repository


def _compare(address: Address) -> str:
    sent: dict[str, list[str] | list[int]] = {"STRINGS": _STRINGS, "INTEGERS": _INTEGERS}
    types = {"STRINGS": "BYTES", "INTEGERS": "INT32"}
    inputs = [
        {"name": name, "shape": [len(data)], "datatype": types[name], "data": data} for name, data in sent.items()
    ]
    connection = http.client.HTTPConnection(_HOST, address.http_port, timeout=10)
    try:
        connection.request("POST", f"/v2/models/{_MODEL}/infer", json.dumps({"inputs": inputs}))
        reply = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "outputs" not in reply:
        return f"the stub refused the request: {reply.get('error', reply)}"
    back = {output["name"].removesuffix("_BACK"): output["data"] for output in reply["outputs"]}
    wrong = [f"{name} {data} came back as {back.get(name)}" for name, data in sent.items() if back.get(name) != data]
    return "; ".join(wrong)

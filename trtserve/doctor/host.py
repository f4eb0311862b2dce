"""The machine itself: system, CPU, memory within its cgroup, shared memory, disk, ports."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from trtserve import machine
from trtserve.doctor.findings import EVERY, OPENVINO, Finding, State
from trtserve.errors import counted
from trtserve.machine import gibibytes
from trtserve.ports import is_free, owner
from trtserve.store import Store
from trtserve.triton.server import Address

MINIMUM_GLIBC = (2, 35)
MINIMUM_SHARED_MEMORY = 32 * 2**20
MINIMUM_MEMORY = 2**30
MINIMUM_DISK = 2**30
PLENTY_OF_DISK = 20 * 2**30
# What NVIDIA's guides give the containers of several ranks (--shm-size); Docker's own 64 MiB stop NCCL.
SHARED_MEMORY_OF_RANKS = 2**30
ARCHITECTURES = ("x86_64", "aarch64")
PYTHONS = ((3, 10), (3, 12))

# As the kernel names them: instructions that the arithmetic of the openvino runtime gets faster by.
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


def check_system(system: str, architecture: str) -> Finding:
    """Wheels of Triton, OpenVINO and TensorRT-LLM are for Linux on x86-64 and 64-bit Arm."""
    fits = system == "Linux" and architecture in ARCHITECTURES
    return Finding(
        group="machine",
        name="system",
        state="ok" if fits else "failed",
        evidence=f"{system} {platform.release()} on {architecture}",
        fix="" if fits else "Use Linux on x86-64 or aarch64.",
        needed_by=EVERY,
    )


def check_glibc(version: tuple[str, str]) -> Finding:
    """Triton of nvidia-pytriton is linked against glibc 2.35; older ones fail with a missing symbol."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version[1])[:2])
    fits = version[0] == "glibc" and numbers >= MINIMUM_GLIBC
    return Finding(
        group="machine",
        name="glibc",
        state="ok" if fits else "failed",
        evidence=" ".join(version).strip() or "no glibc",
        fix="" if fits else "Use a system with glibc 2.35 or newer, such as Ubuntu 22.04 or Debian 12.",
        needed_by=OPENVINO,
    )


def check_cpu(flags: frozenset[str], cores: int) -> Finding:
    """Cores that this process may use, and the instructions that decide the speed of the openvino runtime."""
    names = list(dict.fromkeys(name for flag, name in _INSTRUCTIONS.items() if flag in flags))
    slow = not flags & {"avx2", "asimd"}
    return Finding(
        group="machine",
        name="CPU",
        state="warning" if slow else "ok",
        evidence=f"{counted(cores, 'core')}, {', '.join(names) or 'no vector instructions that are known here'}",
        fix="OpenVINO is slow without AVX2: choose a newer machine for the openvino runtime." if slow else "",
    )


def check_memory(wanted: int, *, least: int = 0) -> Finding:
    """Free memory against `wanted` bytes (a warning) and `least` (without them nothing can work)."""
    free, total, physical = machine.free_memory(), machine.total_memory(), machine.physical_memory()
    state: State = "failed" if free < least else "warning" if free < wanted else "ok"
    needed = "" if state == "ok" else f"; about {gibibytes(max(wanted, least))} needed"
    limit = f" (the limit of this process; the machine has {gibibytes(physical)})" if total < physical else ""
    return Finding(
        group="machine",
        name="memory",
        state=state,
        evidence=f"{gibibytes(free)} free of {gibibytes(total)}{limit}{needed}",
        fix=""
        if state == "ok"
        else "Close other programs, or build a smaller engine (`trtserve import --quantize int8`).",
        needed_by=EVERY,
    )


def check_shared_memory(folder: Path, *, least: int = MINIMUM_SHARED_MEMORY, wanted: int = 0) -> Finding:
    """Each Python model needs at least 1 MiB there, more for large tensors; `least` bytes must be free.

    Less than `wanted` is a warning: ranks that exchange tensors (NCCL) take more.
    """
    fix = "In Docker: --shm-size=1g."
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return _shared_memory("failed", f"{folder} cannot be written", fix)
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if free < max(least, wanted):
        evidence = f"{gibibytes(free)} free in {folder}; {gibibytes(max(least, wanted))} needed"
        return _shared_memory("failed" if free < least else "warning", evidence, fix)
    return _shared_memory("ok", f"{gibibytes(free)} free in {folder}", "")


def _shared_memory(state: State, evidence: str, fix: str) -> Finding:
    return Finding(group="machine", name="shared memory", state=state, evidence=evidence, fix=fix, needed_by=EVERY)


def check_disk(store: Store) -> Finding:
    """Room for models and engines where the store is, and the right to write there."""
    free = machine.free_disk(store.root)
    folder = next(parent for parent in (store.root, *store.root.parents) if parent.exists())
    state: State = "failed" if free < MINIMUM_DISK else "warning" if free < PLENTY_OF_DISK else "ok"
    evidence, fix = (
        f"{gibibytes(free)} free for {store.root}",
        "Free some space, or set TRTSERVE_HOME to a larger disk.",
    )
    if not os.access(folder, os.W_OK):
        state, evidence, fix = "failed", f"{folder} cannot be written", "Set TRTSERVE_HOME to a folder of yours."
    elif state != "ok":
        evidence += "; a 7 B model takes about 40 GB from import to repository"
    return Finding(
        group="machine",
        name="disk",
        state=state,
        evidence=evidence,
        fix="" if state == "ok" else fix,
        needed_by=EVERY,
    )


def check_ports(address: Address) -> Finding:
    """Whether the default ports are free; taken ones are a warning, since `start` takes flags."""
    numbers = tuple(address.ports.values())
    taken = [port for port in dict.fromkeys(numbers) if not is_free(address.host, port)]
    if not taken:
        return Finding(group="machine", name="ports", state="ok", evidence=f"{', '.join(map(str, numbers))} are free")
    owners: dict[str, list[str]] = {}
    for port in taken:
        owners.setdefault(owner(port)[1] or "another process", []).append(str(port))
    evidence = "; ".join(
        f"{', '.join(ports)} {'is' if len(ports) == 1 else 'are'} taken by {name}" for name, ports in owners.items()
    )
    return Finding(
        group="machine", name="ports", state="warning", evidence=evidence, fix="Use `trtserve start --auto-ports`."
    )


def check_python_version() -> Finding:
    """The versions for which trtserve, Triton's stub and TensorRT-LLM exist."""
    version = sys.version_info[:2]
    fits = PYTHONS[0] <= version <= PYTHONS[1]
    names = " – ".join(".".join(map(str, each)) for each in PYTHONS)
    return Finding(
        group="python",
        name="Python",
        state="ok" if fits else "failed",
        evidence=f"{platform.python_version()} at {sys.executable}",
        fix="" if fits else f"Use Python {names}.",
        needed_by=EVERY,
    )

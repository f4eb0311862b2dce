"""The machine itself: system, CPU, memory within its cgroup, shared memory, disk, ports."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

from trtserve.errors import counted
from trtserve.host import machine
from trtserve.host.machine import MINIMUM_SHARED_MEMORY, SHARED_MEMORY, format_bytes, free_shared_memory
from trtserve.host.ports import is_free, owner
from trtserve.server.doctor.findings import (
    EMBEDDED,
    EVERY,
    Finding,
    State,
)
from trtserve.server.triton.tritonserver import Address
from trtserve.store import Store

MINIMUM_GLIBC = (2, 35)
MINIMUM_MEMORY = 2**30
MINIMUM_DISK = 2**30
PLENTY_OF_DISK = 20 * 2**30
# NVIDIA's guides use this --shm-size for several ranks; Docker's default of 64 MiB stops NCCL.
SHARED_MEMORY_OF_RANKS = 2**30
ARCHITECTURES = ("x86_64", "aarch64")
PYTHONS = ((3, 10), (3, 12))

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


def check_system(system: str, architecture: str) -> Finding:
    """Check the system: wheels of Triton, OpenVINO and TensorRT-LLM exist for Linux on x86-64 and 64-bit Arm."""
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
    """Check glibc: nvidia-pytriton's Triton needs 2.35, and reports only a missing symbol with an older one."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version[1])[:2])
    fits = version[0] == "glibc" and numbers >= MINIMUM_GLIBC
    return Finding(
        group="machine",
        name="glibc",
        state="ok" if fits else "failed",
        evidence=" ".join(version).strip() or "no glibc",
        fix="" if fits else "Use a system with glibc 2.35 or newer, such as Ubuntu 22.04 or Debian 12.",
        needed_by=EMBEDDED,
    )


def check_cpu(flags: frozenset[str], cores: int) -> Finding:
    """Report the cores that this process may use, and the instructions that make the openvino runtime fast."""
    names = list(dict.fromkeys(name for flag, name in _INSTRUCTIONS.items() if flag in flags))
    slow = not flags & {"avx2", "asimd"}
    return Finding(
        group="machine",
        name="CPU",
        state="warning" if slow else "ok",
        evidence=f"{counted(cores, 'core')}, {', '.join(names) or 'no known vector instructions'}",
        fix="This CPU lacks AVX2, so the openvino runtime will be slow." if slow else "",
    )


def check_memory(wanted: int, *, least: int = 0) -> Finding:
    """Compare free memory with `wanted` bytes (less is a warning) and `least` (less is a failure)."""
    free, total, physical = machine.free_memory(), machine.total_memory(), machine.physical_memory()
    state: State = "failed" if free < least else "warning" if free < wanted else "ok"
    needed = "" if state == "ok" else f"; about {format_bytes(max(wanted, least))} needed"
    limit = f" (the limit of this process; the machine has {format_bytes(physical)})" if total < physical else ""
    return Finding(
        group="machine",
        name="memory",
        state=state,
        evidence=f"{format_bytes(free)} free of {format_bytes(total)}{limit}{needed}",
        fix=""
        if state == "ok"
        else "Close other programs, or build a smaller engine (`trtserve import --quantize int8`).",
        needed_by=EVERY,
    )


def check_shared_memory(
    folder: Path = SHARED_MEMORY, *, least: int = MINIMUM_SHARED_MEMORY, wanted: int = 0
) -> Finding:
    """Check that `least` bytes are free there; less than `wanted`, which NCCL needs between ranks, is a warning."""
    fix = "In Docker: --shm-size=1g."
    free = free_shared_memory(folder)
    if free is None:
        return _shared_memory("failed", f"{folder} is not writable", fix)
    if free < max(least, wanted):
        evidence = f"{format_bytes(free)} free in {folder}; {format_bytes(max(least, wanted))} needed"
        return _shared_memory("failed" if free < least else "warning", evidence, fix)
    return _shared_memory("ok", f"{format_bytes(free)} free in {folder}", "")


def _shared_memory(state: State, evidence: str, fix: str) -> Finding:
    return Finding(group="machine", name="shared memory", state=state, evidence=evidence, fix=fix, needed_by=EVERY)


def check_disk(store: Store) -> Finding:
    """Check free space for models and engines in the store, and permission to write there."""
    free = machine.free_disk(store.root)
    folder = next(parent for parent in (store.root, *store.root.parents) if parent.exists())
    state: State = "failed" if free < MINIMUM_DISK else "warning" if free < PLENTY_OF_DISK else "ok"
    evidence = f"{format_bytes(free)} free for {store.root}"
    fix = "Free some space, or set TRTSERVE_HOME to a larger disk."
    if not os.access(folder, os.W_OK):
        state, evidence, fix = "failed", f"{folder} is not writable", "Set TRTSERVE_HOME to a folder that you own."
    elif state != "ok":
        evidence += "; a 7 B model needs about 40 GB from import to repository"
    return Finding(
        group="machine",
        name="disk",
        state=state,
        evidence=evidence,
        fix="" if state == "ok" else fix,
        needed_by=EVERY,
    )


def check_ports(address: Address) -> Finding:
    """Check whether the default ports are free; a taken port is a warning, because `start` can use others."""
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
    """Check the Python version: trtserve, Triton's stub and TensorRT-LLM exist for these."""
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

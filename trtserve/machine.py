"""What this machine has: memory within its cgroup, disk, CPU features."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def total_memory() -> int:
    """Bytes of memory that this process may use at most: the machine's, or its cgroup's limit if smaller."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = _cgroup_limit()
    return total if limit is None else min(total, limit)


def free_memory() -> int:
    """Bytes of memory that can still be taken: what the kernel calls available, or what the cgroup has left."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = _cgroup_limit(), _cgroup_usage()
    return available if limit is None or used is None else max(0, min(available, limit - used))


def free_disk(path: Path) -> int:
    """Free bytes for this user on the file system of `path`, or of its nearest existing parent."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def cpu_flags() -> frozenset[str]:
    """Feature flags of the CPU as the kernel names them (`avx512_bf16`, `amx_bf16`, …)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line.split(":", 1)[1] for line in text.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, "").split())


def has_bfloat16() -> bool:
    """True when the CPU multiplies bfloat16 natively."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def describe() -> dict[str, str | int]:
    """Facts that decide whether an engine runs here as it did where it was built."""
    return {"system": platform.system(), "machine": platform.machine(), "bfloat16": int(has_bfloat16())}


def differences(built: Mapping[str, str | int]) -> list[str]:
    """In what this machine differs from `built`, the description of another; sentences for a warning."""
    return [
        f"The engine was built on a machine with {key} {built[key]}; here it is {here}. Speed and results may differ."
        for key, here in describe().items()
        if key in built and built[key] != here
    ]


def gibibytes(count: float) -> str:
    """Bytes for people: `1.5 GiB`, `20 MiB`, `300 KiB`."""
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 or count == 0 else f"{count / 2**10:.0f} KiB"


def _cgroup_limit() -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _read(_CGROUP / name)
        if text is not None and text.isdigit() and int(text) < 2**60:
            return int(text)
    return None


def _cgroup_usage() -> int | None:
    """Bytes in use without the page cache that the kernel can drop."""
    for name, stat in (("memory.current", "memory.stat"), ("memory/memory.usage_in_bytes", "memory/memory.stat")):
        text = _read(_CGROUP / name)
        if text is not None and text.isdigit():
            return int(text) - _inactive_file(_read(_CGROUP / stat) or "")
    return None


def _inactive_file(stat: str) -> int:
    pairs = (line.split() for line in stat.splitlines())
    return next((int(value) for key, value in pairs if key in ("inactive_file", "total_inactive_file")), 0)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None

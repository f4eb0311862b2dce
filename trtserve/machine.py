"""What this machine has: memory within its cgroup, disk, CPU features."""

from __future__ import annotations

import ctypes
import errno
import gc
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_OWN_SIZE = Path("/proc/self/statm")
_MEMORY = Path("/proc/meminfo")
# A setting of glibc's mallopt (malloc.h), and what it is set to.
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK = 2**20
# Version 1 says "no limit" with the largest number of pages.
_UNLIMITED = 2**60
# What loaders, OpenVINO, PyTorch and Python's threads say when they were given no memory.
_NO_MEMORY = (
    "bad_alloc",
    "bad allocation",
    "cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "failed to map segment from shared object",
)


@dataclass(frozen=True, kw_only=True)
class AddressSpace:
    """Bytes of addresses that this process may have at most (RLIMIT_AS, `ulimit -v`), and those that it has.

    They are more than memory: libraries and files that are mapped count in full, and what is set aside for threads.
    """

    limit: int
    used: int

    @property
    def left(self) -> int:
        """Bytes that can still be taken."""
        return max(0, self.limit - self.used)


def address_space() -> AddressSpace | None:
    """The limit of this process; None where there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    pages = (_read(_OWN_SIZE) or "0").split()[0]
    return AddressSpace(limit=limit, used=int(pages) * resource.getpagesize())


def total_memory() -> int:
    """Bytes of memory that this process may use at most: the machine's, or the limit of its cgroup or of its own."""
    space = address_space()
    return min([physical_memory(), *(group.limit for group in _memory_groups()), *([space.limit] if space else [])])


def physical_memory() -> int:
    """Bytes of memory of the machine, whatever part of it this process may use."""
    return _kernel_memory("MemTotal")


def free_memory() -> int:
    """Bytes that can still be taken: what the kernel calls available, or what a cgroup or RLIMIT_AS has left."""
    available, space = _kernel_memory("MemAvailable"), address_space()
    left = [group.limit - group.used for group in _memory_groups()] + ([space.left] if space else [])
    return max(0, min([available, *left]))


def _kernel_memory(name: str) -> int:
    """Bytes of a line of /proc/meminfo, which counts in KiB; psutil, which reads it too, takes longer to load."""
    lines = _MEMORY.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def refused_memory(error: BaseException | None) -> BaseException | None:
    """What of an error and its causes is a refused allocation, in whatever words; None when nothing is.

    A library may be what was not mapped.
    """
    looked_at: set[int] = set()
    while error is not None and not _is_refused_memory(error):
        looked_at.add(id(error))
        # An error that was raised twice may be, by way of others, its own cause.
        error = error.__cause__ if id(error.__cause__) not in looked_at else None
    return error


def _is_refused_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, OSError)):
        return isinstance(error, MemoryError) or error.errno == errno.ENOMEM
    if not isinstance(error, (ImportError, RuntimeError, SystemError)):
        return False
    # A library on a file system that is mounted without execution is not mapped either.
    text = str(error).lower()
    return "operation not permitted" not in text and any(words in text for words in _NO_MEMORY)


def free_disk(path: Path) -> int:
    """Free bytes for this user on the file system of `path`, or of its nearest existing parent."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def give_memory_back() -> None:
    """Return memory that this process has freed to the system; glibc keeps it for itself."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def take_large_blocks_from_system() -> None:
    """From now on memory of 1 MiB and more goes back to the system when it is freed, wherever it lies.

    glibc raises that size up to 32 MiB by itself, and takes smaller blocks from its heap, where they leave holes.
    Other C libraries have no such setting, nor that heap.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


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
    """Bytes for people: `1.5 GiB`, `20 MiB`, `300 KiB`, `512 bytes`."""
    if 0 < count < 2**10:
        return f"{count:.0f} bytes"
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 or count == 0 else f"{count / 2**10:.0f} KiB"


@dataclass(frozen=True, kw_only=True)
class _MemoryGroup:
    """A cgroup with a limit, and what is in use of it without the page cache that the kernel can drop."""

    limit: int
    used: int


def _memory_groups() -> Iterator[_MemoryGroup]:
    """The limited cgroups of this process: its own and those around it, each of which counts what is inside."""
    for root, own, limit, usage in _hierarchies():
        for folder in (own, *own.parents):
            if root not in (folder, *folder.parents):
                break
            highest, used = _number(folder / limit), _number(folder / usage)
            if highest is not None and highest < _UNLIMITED and used is not None:
                used -= _inactive_file(_read(folder / "memory.stat") or "")
                yield _MemoryGroup(limit=highest, used=used)


def _hierarchies() -> Iterator[tuple[Path, Path, str, str]]:
    """Root, folder of this process, and names of the files for limit and usage: version 2, then version 1.

    In a container the path of the host may not exist: there the root is the container's own group.
    """
    lines = (line.split(":", 2) for line in (_read(_OWN_CGROUPS) or "").splitlines())
    paths = {controllers: path for _, controllers, path in (line for line in lines if len(line) == 3)}
    memory = next((path for names, path in paths.items() if "memory" in names.split(",")), "/")
    for root, path, limit, usage in (
        (_CGROUP, paths.get("", "/"), "memory.max", "memory.current"),
        (_CGROUP / "memory", memory, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        own = root / path.lstrip("/")
        yield root, own if ".." not in path and own.is_dir() else root, limit, usage


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.isdigit() else None


def _inactive_file(stat: str) -> int:
    pairs = (line.split() for line in stat.splitlines())
    return next((int(value) for key, value in pairs if key in ("inactive_file", "total_inactive_file")), 0)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None

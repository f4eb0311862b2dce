"""Memory within this process's cgroup, free disk, processors, times of work; what every stage requires of them."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib.util
import json
import os
import platform
import re
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from trtserve.errors import DiskSpaceError, MachineError, MemoryLimitError, UsageError

SHARED_MEMORY = Path("/dev/shm")
MINIMUM_SHARED_MEMORY = 32 * 2**20
"""Bytes that a server needs there; each Python model needs 1 MiB or more on top, depending on its tensors."""

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_OWN_SIZE = Path("/proc/self/statm")
_MEMORY = Path("/proc/meminfo")
# A setting of glibc's mallopt (malloc.h), and its value here.
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK = 2**20
_UNLIMITED = 2**60  # version 1 says "no limit" with the largest number of pages
# Messages of loaders, OpenVINO, PyTorch and Python's threads when an allocation was refused.
_NO_MEMORY = (
    "bad_alloc",
    "bad allocation",
    "cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "failed to map segment from shared object",
)
RESERVE = 256 * 2**20  # left free for other programs that write to the disk
# OpenVINO with its graph compilation threads; NumPy with OpenBLAS's buffers per thread.
_ADDRESSES = {"numpy": 26 * 2**20, "openvino": 430 * 2**20, "transformers": 110 * 2**20, "torch": 490 * 2**20}
_NUMPY_THREAD = 40 * 2**20


@dataclass(frozen=True, kw_only=True)
class AddressSpace:
    """The address space of this process, in bytes, which `ulimit -v` limits (RLIMIT_AS).

    It is larger than the memory in use: mapped libraries and files count in full, and so do stacks of threads.
    """

    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def address_space() -> AddressSpace | None:
    """Return the limit of this process, or None."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    pages = (read_system_file(_OWN_SIZE) or "0").split()[0]
    return AddressSpace(limit=limit, used=int(pages) * resource.getpagesize())


def total_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or the limit of a cgroup or of itself."""
    space = address_space()
    return min([physical_memory(), *(group.limit for group in _memory_groups()), *([space.limit] if space else [])])


def physical_memory() -> int:
    """Return the bytes of memory of the machine, regardless of limits."""
    return _kernel_memory("MemTotal")


def free_memory() -> int:
    """Return the bytes that are left: what the kernel calls available, or less where a cgroup or RLIMIT_AS says so."""
    available, space = _kernel_memory("MemAvailable"), address_space()
    left = [group.limit - group.used for group in _memory_groups()] + ([space.left] if space else [])
    return max(0, min([available, *left]))


def _kernel_memory(name: str) -> int:
    """Return a line of /proc/meminfo in bytes; psutil, which also reads that file, takes longer to load."""
    lines = _MEMORY.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def refused_memory(error: BaseException | None) -> BaseException | None:
    """Return the error in the chain of causes that means a refused allocation, or None.

    The message depends on the library. A library that could not be mapped counts too.
    """
    seen: set[int] = set()
    while error is not None and not _is_refused_memory(error):
        seen.add(id(error))
        # An error that is raised twice can be a cause of itself.
        error = error.__cause__ if id(error.__cause__) not in seen else None
    return error


def _is_refused_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, OSError)):
        return isinstance(error, MemoryError) or error.errno == errno.ENOMEM
    if not isinstance(error, (ImportError, RuntimeError, SystemError)):
        return False
    # A file system that is mounted without execution also refuses to map a library.
    text = str(error).lower()
    return "operation not permitted" not in text and any(words in text for words in _NO_MEMORY)


def free_shared_memory(folder: Path = SHARED_MEMORY) -> int | None:
    """Return the free bytes of shared memory, or None where this process cannot write there."""
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return None
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def free_disk(path: Path) -> int:
    """Return the free bytes of the file system of `path`, or of its nearest existing parent, for this user."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def give_memory_back() -> None:
    """Return freed memory to the system; glibc would keep it for this process."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def take_large_blocks_from_system() -> None:
    """Make glibc return every block of 1 MiB or more to the system when it is freed.

    By default glibc raises that size up to 32 MiB, and smaller blocks leave holes in its heap. Other C libraries have
    neither this setting nor that heap.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def cpu_flags() -> frozenset[str]:
    """Return the feature flags of the CPU, as the kernel names them (`avx512_bf16`, `amx_bf16`, …)."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line.split(":", 1)[1] for line in text.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, "").split())


def has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 natively."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def fastest(run: Callable[[], object], seconds: float = 1.0) -> float:
    """Run for so many seconds, at least twice, and return those of the fastest run after the first one.

    The first run prepares, for example packs weights. Other programs only make runs slower.
    """
    run()
    end, times = time.monotonic() + seconds, list[float]()
    while not times or time.monotonic() < end:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def describe() -> dict[str, str | int]:
    """Return the facts that decide whether an engine runs as it did on the machine that built it."""
    return {"system": platform.system(), "machine": platform.machine(), "bfloat16": int(has_bfloat16())}


def differences(built: Mapping[str, str | int]) -> list[str]:
    """Return a warning for each fact in which this machine differs from `built`, the description of another."""
    return [
        f"The engine was built on a machine with {key} {built[key]}; here it is {here}. Speed and results may differ."
        for key, here in describe().items()
        if key in built and built[key] != here
    ]


def format_bytes(count: float) -> str:
    """Format bytes for messages and tables: `1.5 GiB`, `20 MiB`, `300 KiB`, `512 bytes`."""
    if 0 < count < 2**10:
        return f"{count:.0f} bytes"
    if count >= 2**30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 or count == 0 else f"{count / 2**10:.0f} KiB"


@dataclass(frozen=True, kw_only=True)
class _MemoryGroup:
    limit: int
    used: int  # without the page cache that the kernel can drop


def _memory_groups() -> Iterator[_MemoryGroup]:
    """Yield the limited cgroups of this process, from its own to the outermost; each counts what is inside."""
    for root, own, limit, usage in _hierarchies():
        for folder in (own, *own.parents):
            if root not in (folder, *folder.parents):
                break
            highest, used = _number(folder / limit), _number(folder / usage)
            if highest is not None and highest < _UNLIMITED and used is not None:
                pairs = (line.split() for line in (read_system_file(folder / "memory.stat") or "").splitlines())
                used -= next((int(value) for key, value in pairs if key in ("inactive_file", "total_inactive_file")), 0)
                yield _MemoryGroup(limit=highest, used=used)


def _hierarchies() -> Iterator[tuple[Path, Path, str, str]]:
    """Yield root, folder of this process, and names of the files for limit and usage, of cgroup version 2 and 1.

    In a container the host's path may not exist; there the root is the container's own group.
    """
    lines = (line.split(":", 2) for line in (read_system_file(_OWN_CGROUPS) or "").splitlines())
    paths = {controllers: path for _, controllers, path in (line for line in lines if len(line) == 3)}
    memory = next((path for names, path in paths.items() if "memory" in names.split(",")), "/")
    for root, path, limit, usage in (
        (_CGROUP, paths.get("", "/"), "memory.max", "memory.current"),
        (_CGROUP / "memory", memory, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        own = root / path.lstrip("/")
        yield root, own if ".." not in path and own.is_dir() else root, limit, usage


def _number(path: Path) -> int | None:
    text = read_system_file(path)
    return int(text) if text is not None and text.isdigit() else None


def read_system_file(path: Path) -> str | None:
    """Return a file of the kernel without the line's end, or None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def require_disk(
    folder: Path, needed: int, what: str, *, option: str = "--out or TRTSERVE_HOME", smaller: str = ""
) -> None:
    """Raise DiskSpaceError when the file system of `folder` lacks `needed` bytes for `what` plus a reserve.

    `option` names the setting for another folder, `smaller` is a sentence on settings that need less.
    """
    free = free_disk(folder)
    if needed > 0 and free < needed + RESERVE:
        raise DiskSpaceError(
            f"{what} would take {format_bytes(needed)} plus a reserve of {format_bytes(RESERVE)}; {folder} has"
            f" {format_bytes(free)} free.",
            hint=f"Free some space (`trtserve remove`), or choose a folder on a larger disk with {option}."
            + f" {smaller}".rstrip(),
        )


def require_memory(needed: int, what: str, advice: Callable[[int], str], *, mapped: int = 0) -> None:
    """Raise MemoryLimitError when fewer than `needed` bytes of memory are free for `what`, such as "X needs".

    `advice` takes the free bytes and says what would fit; `mapped` as in `available_memory`.
    """
    available = available_memory(mapped)
    if needed > available.free:
        raise MemoryLimitError(
            f"{what} {format_bytes(needed)} of memory; {format_bytes(available.free)} are free{available.limit}.",
            hint=f"{available.advice}{advice(available.free)}",
        )


@dataclass(frozen=True, kw_only=True)
class AvailableMemory:
    """Free bytes of memory; `limit` describes what limits them, `advice` starts the advice in that case."""

    free: int
    limit: str = ""
    advice: str = ""


def available_memory(mapped: int = 0) -> AvailableMemory:
    """Return the memory free for a stage; `mapped` is the size of libraries and files still to be mapped.

    Mapped files use no memory, but count against a limit on the process's address space.
    """
    free, space = free_memory(), address_space()
    if space is None or space.left - mapped > free:
        return AvailableMemory(free=free)
    libraries = f", and libraries and files will take {format_bytes(mapped)}" if mapped else ""
    return AvailableMemory(
        free=max(0, space.left - mapped),
        limit=f" (ulimit -v allows this process {format_bytes(space.limit)} of addresses: it has "
        f"{format_bytes(space.used)}{libraries})",
        advice="Raise the limit: ulimit -v unlimited. Else: ",
    )


def to_be_mapped(*names: str, files: int = 0) -> int:
    """Return the address space for those of the libraries `names` not yet loaded, plus `files` bytes of files."""
    return files + sum(_addresses(name) for name in names if name not in sys.modules)


def _addresses(name: str) -> int:
    """Measured for the installed libraries (NumPy 1.26, OpenVINO 2026.4, transformers 5.23, PyTorch 2.13)."""
    if importlib.util.find_spec(name) is None:
        return 0
    threads = _NUMPY_THREAD * len(os.sched_getaffinity(0)) if name == "numpy" else 0
    return _ADDRESSES[name] + threads


def install_command(extra: str | None = None) -> str:
    """Return `pip install` with the clone that trtserve came from, or with its name; `extra` is cpu, oracle …

    What runs from its clone is installed so again: changes of the clone stay effective.
    """
    clone = _clone()
    place = "trtserve" if clone is None else "." if clone == Path.cwd() else str(clone)
    editable = "--editable " if clone is not None and clone == Path(__file__).parents[2] else ""
    return f"pip install {editable}{shlex.quote(f'{place}[{extra}]' if extra else place)}"


def _clone() -> Path | None:
    """The folder that trtserve was installed from, or runs from, or None for an installation from a package index."""
    source = Path(__file__).parents[2]
    if (source / "pyproject.toml").is_file():
        return source
    from importlib import metadata

    try:
        origin = json.loads(metadata.distribution("trtserve").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return None
    url = urlparse(str(origin.get("url", "")))
    folder = Path(unquote(url.path))
    return folder if url.scheme == "file" and (folder / "pyproject.toml").is_file() else None


NODES = Path("/sys/devices/system/node")
# set_mempolicy(2) has no function in the C library.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_BIND = 2
_MOST = 8192


def parse_cpus(text: str) -> frozenset[int]:
    """Return the processors of a list such as `0-3,8`, as the kernel and taskset write it. Raises UsageError."""
    spans = [re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip()) for part in text.split(",")]
    if not all(spans):
        raise UsageError(f"{text[:100]!r} is not a list of processors.", hint="Expected numbers and ranges: 0-3,8")
    found = {cpu for span in spans if span for cpu in range(int(span[1]), int(span[2] or span[1]) + 1)}
    if not found or max(found) >= _MOST:
        raise UsageError(f"{text[:100]!r} names no processor below {_MOST}.", hint="A range goes from low to high.")
    return frozenset(found)


def pin(cpus: Collection[int], node: int | None) -> None:
    """Run this process, and what it starts later, on these processors, or on those of a NUMA node with its memory.

    Raises MachineError for a processor or a node that this machine, or this container, does not have.
    """
    allowed = os.sched_getaffinity(0)
    if node is not None:
        listed = NODES / f"node{node}" / "cpulist"
        if not listed.is_file():
            nodes = sorted(int(path.name.removeprefix("node")) for path in NODES.glob("node[0-9]*"))
            raise MachineError(f"This machine has no NUMA node {node}.", hint=f"It has {nodes or 'none'}: see lscpu.")
        of_node = parse_cpus(listed.read_text(encoding="ascii").strip())
        cpus = (set(cpus) & of_node) if cpus else of_node & allowed
    if not cpus or not allowed.issuperset(cpus):
        raise MachineError(
            f"Processors {sorted(cpus) or 'of both --cpus and --numa'} cannot be used.",
            hint=f"This process may use {sorted(allowed)}.",
        )
    if node is not None:
        _bind_memory(node)
    os.sched_setaffinity(0, cpus)


def _bind_memory(node: int) -> None:
    import ctypes
    import platform

    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    call = ctypes.CDLL(None, use_errno=True).syscall
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or call(number, _MPOL_BIND, mask, len(mask) * 64 + 1):
        raise MachineError(
            f"The memory of NUMA node {node} cannot be chosen: {os.strerror(ctypes.get_errno())}.",
            hint="In a container this needs the capability SYS_NICE; --cpus alone does not.",
        )

"""Guards of every stage: compare the required memory (within the cgroup) and disk with what is free."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtserve.errors import DiskSpaceError, MemoryLimitError
from trtserve.host.machine import address_space, format_bytes, free_disk, free_memory

# Left free for other programs that write to the disk.
RESERVE = 256 * 2**20

# OpenVINO with its graph compilation threads; NumPy with OpenBLAS's buffers per thread.
_ADDRESSES = {
    "numpy": 26 * 2**20,
    "openvino": 430 * 2**20,
    "transformers": 110 * 2**20,
    "torch": 490 * 2**20,
}
_NUMPY_THREAD = 40 * 2**20


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

"""The guard of every stage: memory (within the cgroup) and disk are compared with the need before anything begins."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtserve.errors import DiskSpaceError, MemoryLimitError
from trtserve.machine import address_space, free_disk, free_memory, gibibytes

# Left free for everything else that writes to the disk meanwhile.
RESERVE = 256 * 2**20

# OpenVINO with the threads that compile a graph; NumPy beside what each of OpenBLAS's threads sets aside.
_ADDRESSES = {
    "numpy": 26 * 2**20,
    "openvino": 430 * 2**20,
    "transformers": 110 * 2**20,
    "torch": 490 * 2**20,
}
_NUMPY_THREAD = 40 * 2**20


def require_disk(
    folder: Path, needed: int, what: str, *, elsewhere: str = "--out or TRTSERVE_HOME", smaller: str = ""
) -> None:
    """DiskSpaceError when the file system of `folder` has not `needed` bytes for `what` and a reserve.

    `elsewhere` are the settings that choose another folder, `smaller` is a sentence with those that need less.
    """
    free = free_disk(folder)
    if needed > 0 and free < needed + RESERVE:
        raise DiskSpaceError(
            f"{what} would take {gibibytes(needed)}, and {gibibytes(RESERVE)} stay in reserve; {folder} has"
            f" {gibibytes(free)} free.",
            hint=f"Free some space (`trtserve remove`), or choose a folder on a larger disk with {elsewhere}."
            + f" {smaller}".rstrip(),
        )


def smaller_checkpoint(dtype: str) -> str:
    """What makes a checkpoint of our own smaller: its weights are floats, whatever an engine makes of them."""
    return "--dtype bfloat16 or float16 makes it half as large." if dtype == "float32" else ""


def require_memory(needed: int, what: str, advice: Callable[[int], str], *, mapped: int = 0) -> None:
    """MemoryLimitError when fewer than `needed` bytes of memory are free for `what`, which ends like "X needs".

    `advice` is given the free bytes and says what would fit; `mapped` is that of `memory_room`.
    """
    room = memory_room(mapped)
    if needed > room.free:
        raise MemoryLimitError(
            f"{what} {gibibytes(needed)} of memory; {gibibytes(room.free)} are free{room.limit}.",
            hint=f"{room.advice}{advice(room.free)}",
        )


@dataclass(frozen=True, kw_only=True)
class Room:
    """Free bytes of memory; `limit` says in words what limits them, `advice` how to begin an advice then."""

    free: int
    limit: str = ""
    advice: str = ""


def memory_room(mapped: int = 0) -> Room:
    """The memory that is free for a stage; `mapped` are bytes of libraries and files that it is still to map.

    They are no memory that is taken, and count where the address space of the process is limited.
    """
    free, space = free_memory(), address_space()
    if space is None or space.left - mapped > free:
        return Room(free=free)
    libraries = f", and libraries and files will take {gibibytes(mapped)}" if mapped else ""
    return Room(
        free=max(0, space.left - mapped),
        limit=f" (ulimit -v allows this process {gibibytes(space.limit)} of addresses: it has {gibibytes(space.used)}"
        f"{libraries})",
        advice="Raise the limit: ulimit -v unlimited. Else: ",
    )


def to_be_mapped(*names: str, files: int = 0) -> int:
    """Addresses for those of the libraries `names` that are not loaded here yet, and for `files` bytes of files."""
    return files + sum(_addresses(name) for name in names if name not in sys.modules)


def _addresses(name: str) -> int:
    """Measured (NumPy 1.26, OpenVINO 2026.4, transformers 5.23, PyTorch 2.13), of what is installed."""
    if importlib.util.find_spec(name) is None:
        return 0
    threads = _NUMPY_THREAD * len(os.sched_getaffinity(0)) if name == "numpy" else 0
    return _ADDRESSES[name] + threads

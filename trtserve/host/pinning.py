"""Processors and NUMA nodes that this process, and every process that it starts, may use."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from trtserve.errors import MachineError, UsageError

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

"""Run one of NVIDIA's tools, here or in a container, and explain how it failed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtserve import process
from trtserve.errors import BuildError, ConversionError, DiskSpaceError, MemoryLimitError, TrtserveError
from trtserve.host.machine import format_bytes, free_memory
from trtserve.nvidia.containers import ContainerRun, explained, in_container, remove_container, require_docker
from trtserve.process import Command
from trtserve.process.signals import stop_signals
from trtserve.progress import Progress

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0
_LAST_LINES = 12
# What Python and PyTorch print when the host's memory runs out; the last one, when one of several workers was killed.
_NO_MEMORY = re.compile(r"\bMemoryError|DefaultCPUAllocator: |terminated abruptly")
_NO_GPU_MEMORY = re.compile(r"out of memory|GPU memory", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ToolMemory:
    """How much memory a tool needs, for the error that it ran out."""

    words: str
    """The start of a sentence that goes on with the free memory."""
    advice: str
    """What to do when the host's memory ran out."""
    gpu_advice: str
    """What to do when the GPU's memory ran out."""


def announce(command: Command, box: ContainerRun | None, progress: Progress) -> Command:
    """Return `command` as it runs in the container `box`, if any, and print it.

    Raises MissingDependencyError, MachineError or UsageError when docker cannot run it.
    """
    if box is not None:
        require_docker(box)
        command = in_container(command, box)
    progress.step(str(command))
    return command


def run_tool(
    name: str,
    command: Command,
    *,
    follow: Callable[[], None],
    memory: ToolMemory,
    log: Path,
    failure: type[BuildError] | type[ConversionError],
    box: ContainerRun | None = None,
) -> None:
    """Run an announced command to its end; `follow` is called while it runs, and once after.

    Raises `failure`, with the last lines of the log, unless it ends with 0, and MemoryLimitError or DiskSpaceError when
    memory or disk ran out. Ctrl-C, SIGTERM and SIGHUP end the tool too: none of its processes outlives this call.
    """
    free, ended = free_memory(), False
    with stop_signals() as signals:
        tool = process.spawn(command, log=log, bound=True)
        try:
            while not ended:
                if signals():
                    raise KeyboardInterrupt
                ended = not tool.alive()
                follow()
                if not ended:
                    time.sleep(_POLL_SECONDS)
            code = process.exit_code(tool)
        finally:
            process.stop(tool, grace=_GRACE_SECONDS)
            if box is not None:
                remove_container(box.name)
    if code == 0:
        return
    if box is not None and (reason := explained(last_lines(log))) is not None:
        raise reason
    raise _explained(name, code, command, memory, free, log, failure)


def _explained(
    name: str,
    code: int | None,
    command: Command,
    memory: ToolMemory,
    free: int,
    log: Path,
    failure: type[BuildError] | type[ConversionError],
) -> TrtserveError:
    """Return the error that the exit code and the end of the log stand for."""
    tail = last_lines(log)
    ended, lines = f"{name} ended with {process.ending(code)}", f"Its last lines:\n{tail}"
    if process.was_killed(code) or _NO_MEMORY.search(tail):
        return MemoryLimitError(
            f"{ended}: it ran out of memory. {memory.words} {format_bytes(free)} were free. {lines}",
            hint=memory.advice,
            log=log,
        )
    if "No space left on device" in tail:
        return DiskSpaceError(
            f"{ended}: the disk is full. {lines}", hint="Free some space, or choose another --out.", log=log
        )
    hint = memory.gpu_advice if _NO_GPU_MEMORY.search(tail) else f"The command was: {command}"
    return failure(f"{ended}. {lines}", hint=hint, log=log)


def last_lines(log: Path) -> str:
    """Return the end of a log, indented."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:]) or "  (none)"

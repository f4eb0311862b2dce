"""Run a tool that writes a checkpoint: keep its log, show its progress, and check its result."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve import process
from trtserve.checkpoint.tensor_files import TensorFile
from trtserve.checkpoint.unified import read_config
from trtserve.errors import (
    ConversionError,
    DiskSpaceError,
    MemoryLimitError,
    TrtserveError,
)
from trtserve.host.machine import format_bytes, free_memory
from trtserve.nvidia.containers import (
    ContainerRun,
    explained,
    in_container,
    remove_container,
    require_docker,
)
from trtserve.process import Command
from trtserve.process.interrupts import stop_signals
from trtserve.progress import Progress, Task

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 10.0
_LAST_LINES = 12
# What Python and PyTorch print when the host's memory runs out.
_NO_MEMORY = ("MemoryError", "DefaultCPUAllocator: ")


@dataclass(frozen=True, kw_only=True)
class ToolMemory:
    """How much of the host's memory a tool needs."""

    words: str  # a sentence
    advice: str  # what to do when it is too much


def run_tool(
    command: Command,
    folder: Path,
    *,
    world_size: int,
    memory: ToolMemory,
    log: Path,
    progress: Progress,
    box: ContainerRun | None = None,
) -> dict[str, Any]:
    """Run `command`, which fills `folder`, in the container `box` or here, and return the checkpoint's config.

    Raises ConversionError, with the last lines of the log, when it fails or does not write a checkpoint of `world_size`
    ranks. Raises MemoryLimitError or DiskSpaceError when memory or disk ran out. The tool has ended when this returns
    or raises.
    """
    name = Path(command.argv[1]).name
    if box is not None:
        require_docker(box)
        command = in_container(command, box)
    progress.step(str(command))
    free = free_memory()
    with progress.task(f"Running {name} (log: {log})", total=world_size, unit="items") as task:
        code = _run(command, folder, world_size, log, task, box)
    if code != 0:
        if box is not None and (reason := explained(_tail(log))) is not None:
            raise reason
        raise _failure(name, code, command, memory, free, log)
    return require_checkpoint(folder, name, world_size, log)


def _failure(
    name: str, code: int | None, command: Command, memory: ToolMemory, free: int, log: Path
) -> ConversionError | MemoryLimitError | DiskSpaceError:
    """Return the error that the exit code and the end of the log stand for."""
    tail = _tail(log)
    ended, lines = f"{name} ended with {process.ending(code)}", f"Its last lines:\n{tail}"
    if process.was_killed(code) or any(words in tail for words in _NO_MEMORY):
        return MemoryLimitError(
            f"{ended}: it ran out of memory. {memory.words} {format_bytes(free)} were free. {lines}",
            hint=memory.advice,
            log=log,
        )
    if "No space left on device" in tail:
        return DiskSpaceError(
            f"{ended}: the disk is full. {lines}", hint="Free some space, or choose another --out.", log=log
        )
    hint = f"The command was: {command}"
    if "out of memory" in tail:
        hint = "The GPU ran out of memory: free some, or use a larger GPU."
    return ConversionError(f"{ended}. {lines}", hint=hint, log=log)


def _run(
    command: Command, folder: Path, world_size: int, log: Path, task: Task, box: ContainerRun | None
) -> int | None:
    """Return the exit code; Ctrl-C, SIGTERM and SIGHUP end the tool too."""
    done = 0
    with stop_signals() as signals:
        tool = process.spawn(command, log=log, bound=True)
        try:
            while tool.alive():
                if signals():
                    raise KeyboardInterrupt
                time.sleep(_POLL_SECONDS)
                finished = min(len(list(folder.glob("rank*.safetensors"))), world_size)
                task.advance(finished - done)
                done = finished
            task.advance(world_size - done)
            return process.exit_code(tool)
        finally:
            process.stop(tool, grace=_GRACE_SECONDS)
            if box is not None:
                remove_container(box.name)


def require_checkpoint(folder: Path, tool: str, world_size: int, log: Path) -> dict[str, Any]:
    """Return the checkpoint's config.json. Raises ConversionError when it or a rank is missing or unreadable."""
    try:
        config = read_config(folder)
        found = int((config.get("mapping") or {}).get("world_size", 1))
        if found != world_size:
            raise ConversionError(f"config.json is for {found} ranks; expected {world_size}.")
        for rank in range(world_size):
            path = folder / f"rank{rank}.safetensors"
            if not path.is_file():
                raise ConversionError(f"rank{rank}.safetensors is missing.")
            if not TensorFile(path).entries:
                raise ConversionError(f"rank{rank}.safetensors holds no tensors.")
    except TrtserveError as error:
        raise ConversionError(
            f"{tool} ended without an error, but its checkpoint is incomplete: {error.message} Its last lines:\n"
            f"{_tail(log)}",
            hint="Read the log; free disk and memory are the usual reasons.",
            log=log,
        ) from error
    return config


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "\n".join(f"  {line}" for line in lines[-_LAST_LINES:]) or "  (none)"

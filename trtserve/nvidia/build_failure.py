"""Explain how `trtllm-build` failed, from its exit code and the end of its log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.errors import (
    BuildError,
    DiskSpaceError,
    MemoryLimitError,
    TrtserveError,
)
from trtserve.host.machine import format_bytes
from trtserve.nvidia.build_log import last_lines
from trtserve.nvidia.containers import explained
from trtserve.process import Command, ending, was_killed

if TYPE_CHECKING:
    from trtserve.nvidia.tensorrt_llm import TensorrtPlan


def explain_failure(plan: TensorrtPlan, command: Command, code: int | None, log: Path, free: int) -> TrtserveError:
    """Explain the failure."""
    tail = last_lines(log)
    if plan.container is not None and (reason := explained(tail)) is not None:
        return reason
    ended = f"trtllm-build ended with {ending(code)}"
    # With several workers, a killed one breaks the process pool of the others.
    if was_killed(code) or "terminated abruptly" in tail:
        needed = f"about {format_bytes(plan.expected_memory)} for each rank, {plan.workers} at a time"
        return MemoryLimitError(
            f"{ended}: it ran out of memory. It needs {needed} (an estimate), and {format_bytes(free)} were free. Its "
            f"last lines:\n{tail}",
            hint=f"{'Build one rank after another (--workers 1), free' if plan.workers > 1 else 'Free'} some memory or "
            f"raise its limit, or convert with a larger --tp-size ({plan.parallel} now): each rank is smaller "
            "then.",
            log=log,
        )
    if "No space left on device" in tail:
        return DiskSpaceError(f"{ended}: the disk is full.", hint="Free some space, or choose another --out.", log=log)
    hint = f"The command was: {command}"
    if "out of memory" in tail.lower() or "GPU memory" in tail:
        hint = "The GPU is out of memory: free some, or build with smaller --max-batch-size and --max-num-tokens."
    return BuildError(f"{ended}. Its last lines:\n{tail}", hint=hint, log=log)

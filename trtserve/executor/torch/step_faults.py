"""What the exceptions of a step mean: too little memory, a step that failed, or a GPU that answers nothing any more."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from trtserve.executor.engine.model import FatalModelError

if TYPE_CHECKING:
    from trtserve.executor.torch.operations import Device

# Errors after which every call of CUDA in this process fails (the CUDA runtime's documentation of cudaError_t says so),
# and those of ranks, which then no longer compute the same.
_LOST = re.compile(
    r"CUDA.*(illegal memory access|illegal instruction|misaligned address|invalid program counter|illegal address"
    r"|device-side assert|unspecified launch failure|launch timed out|uncorrectable|hardware stack error"
    r"|busy or unavailable|unknown error)|NCCL|another rank of this model has ended",
    re.IGNORECASE,
)
_WITHOUT_MEMORY = re.compile(r"out of memory|can't allocate memory|STATUS_ALLOC_FAILED", re.IGNORECASE)


class StepFaults:
    """`with` this around a step, exceptions become what the executor distinguishes; it may be entered again and again.

    An exception that says nothing of its kind may still be the first sign of a lost GPU: then `probe` fails too.
    """

    def __init__(self, device: Device, probe: Callable[[], None] | None = None) -> None:
        self._probe = probe if probe is not None or device == "cpu" else _use_gpu

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raise MemoryError or FatalModelError instead of an exception that means it."""
        if not isinstance(error, Exception) or isinstance(error, (FatalModelError, MemoryError)):
            return
        if isinstance(error, torch.OutOfMemoryError) or _WITHOUT_MEMORY.search(_first_line(error)):
            raise MemoryError(_first_line(error)) from error
        if self._lost(error):
            raise FatalModelError(_cause(error)) from error
        if self._probe is None:
            return
        try:
            self._probe()
        except Exception as found:  # noqa: BLE001 - whatever it is, it says how the GPU is
            if isinstance(found, torch.OutOfMemoryError) or _WITHOUT_MEMORY.search(_first_line(found)):
                return  # the GPU answers
            raise FatalModelError(f"{_cause(error)}; then the GPU did not answer either: {_cause(found)}") from error

    def _lost(self, error: Exception) -> bool:
        """Return whether the exception alone shows that the GPU, or another rank, is lost."""
        if isinstance(error, getattr(torch.distributed, "DistError", FatalModelError)):
            return True
        return isinstance(error, RuntimeError) and _LOST.search(_first_line(error)) is not None


def _use_gpu() -> None:
    """Wait for the current GPU and let it compute something: that fails once its context is lost."""
    torch.cuda.synchronize()
    torch.ones(1, device="cuda").add_(1).item()


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text; PyTorch adds hints for programmers."""
    return str(error).strip().partition("\n")[0]

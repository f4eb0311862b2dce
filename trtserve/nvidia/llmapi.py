"""The runtime without engines: TensorRT-LLM's PyTorch backend loads the Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from trtserve.artifacts import Checkpoint
from trtserve.errors import UsageError
from trtserve.progress import Progress
from trtserve.specs import BuildSpec
from trtserve.specs.runtime import (
    TRTLLM_LIMITS,
    CheckpointConfig,
    EnginePlan,
    Limits,
)

NAME = "llmapi"
EMBEDDED = False
HAS_ENGINES = False
NEEDS_GPU = True
QUANTIZES = False
GPU_LIMITS: Limits | None = TRTLLM_LIMITS
EXTRA = ""
LIBRARIES: tuple[str, ...] = ()
TIMED_STAGE = "build"


def plan(config: CheckpointConfig, spec: BuildSpec) -> EnginePlan:
    """Raise UsageError: there is nothing to build."""
    del config, spec
    _refuse()


def needs_of(config: Mapping[str, Any]) -> None:
    """Return None: its engines are served from GPUs."""
    del config


def build(
    plan: EnginePlan, checkpoint: Checkpoint, folder: Path, *, log: Path, progress: Progress, seconds: float | None
) -> dict[str, Any]:
    """Raise UsageError: there is nothing to build."""
    del plan, checkpoint, folder, log, progress, seconds
    _refuse()


def _refuse() -> NoReturn:
    raise UsageError(
        "The llmapi runtime has no engines: TensorRT-LLM's PyTorch backend loads the Hugging Face folder, so there is "
        "nothing to convert or build.",
        hint="Use `trtserve import MODEL --runtime llmapi`, which downloads the model and assembles its repository.",
    )

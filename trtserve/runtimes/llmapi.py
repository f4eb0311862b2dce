"""The runtime without engines: TensorRT-LLM's PyTorch backend loads the Hugging Face model by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from trtserve.artifacts import Checkpoint
from trtserve.errors import UsageError
from trtserve.progress import Progress
from trtserve.runtimes.base import CheckpointConfig, EnginePlan
from trtserve.specs import BuildSpec

NAME = "llmapi"


def plan(config: CheckpointConfig, spec: BuildSpec) -> EnginePlan:
    """UsageError: there is nothing to build."""
    del config, spec
    _refuse()


def build(
    plan: EnginePlan, checkpoint: Checkpoint, folder: Path, *, log: Path, progress: Progress, seconds: float | None
) -> dict[str, Any]:
    """UsageError: there is nothing to build."""
    del plan, checkpoint, folder, log, progress, seconds
    _refuse()


def _refuse() -> NoReturn:
    raise UsageError(
        "The llmapi runtime has no engines: TensorRT-LLM's PyTorch backend loads the Hugging Face folder, so there is "
        "nothing to convert or build.",
        hint="`trtserve import MODEL --runtime llmapi` pulls the model and makes its repository.",
    )

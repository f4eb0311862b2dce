"""The numerical check of a checkpoint against its model, before the checkpoint is published or reused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Checkpoint
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.errors import TrtserveError
from trtserve.pipeline.convert.conversion_plan import ConversionPlan
from trtserve.pipeline.parity import plan_check, require_passed, run_check
from trtserve.progress import Progress
from trtserve.specs import CheckSpec
from trtserve.store import withdraw


class Verification:
    """A check that runs once, on a checkpoint that was just written or on one that is reused."""

    def __init__(
        self,
        plan: ConversionPlan,
        config: CheckpointConfig,
        spec: CheckSpec,
        progress: Progress,
        *,
        windows: bool = True,
    ) -> None:
        """Plan the check of a checkpoint with `config`; raises what `plan_check` does. `windows`: see CheckPlan."""
        self._check = replace(plan_check(config, plan.model.path, spec, progress=progress), windows=windows)
        self._plan = plan
        self._progress = progress
        self._passed = False

    def figures(self, folder: Path) -> dict[str, Any]:
        """Check the checkpoint in `folder` and return its figures. Raises CheckError when they exceed their bounds."""
        report = replace(run_check(self._check, folder, progress=self._progress), path=self._plan.path)
        require_passed(report)
        self._passed = True
        stages = ", ".join(f"{stage.name}: difference {stage.differences.relative:.2g}" for stage in report.stages)
        self._progress.step(f"The checkpoint matches the model ({stages})")
        return {key: value for key, value in report.described().items() if key not in ("path", "against")}

    def published(self, checkpoint: Checkpoint) -> Checkpoint:
        """Check `checkpoint` if it was not written just now; one linked from another name is removed on failure."""
        if not self._passed:
            try:
                self.figures(checkpoint.path)
            except TrtserveError:
                if not self._plan.reused:
                    withdraw(checkpoint)
                raise
        return checkpoint

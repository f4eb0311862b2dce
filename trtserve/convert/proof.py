"""The numerical check of a conversion before its result is published."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Checkpoint, Model
from trtserve.check import CheckPlan, Stage, plan_check, require_passed, run_check
from trtserve.convert.plan import Destination
from trtserve.errors import TrtserveError
from trtserve.progress import Progress
from trtserve.specs import CheckSpec


class Proof:
    """A check that is carried out once, wherever the checkpoint comes from."""

    def __init__(self, plan: CheckPlan, place: Destination, progress: Progress) -> None:
        self._plan = plan
        self._place = place
        self._progress = progress
        self._given = False

    def require(self, folder: Path) -> dict[str, Any]:
        """The figures of the checkpoint in `folder`; CheckError when they are beyond their bounds."""
        report = replace(run_check(self._plan, folder, progress=self._progress), path=self._place.path)
        require_passed(report)
        self._given = True
        figures = report.described()
        self._progress.step(f"The checkpoint is the model ({', '.join(map(_outcome, report.stages))})")
        return {key: value for key, value in figures.items() if key not in ("path", "against")}

    def of_published(self, checkpoint: Checkpoint) -> Checkpoint:
        """`checkpoint`, proven if it was not made just now; a folder of links that fails is taken away again."""
        if not self._given:
            try:
                self.require(checkpoint.path)
            except TrtserveError:
                if not self._place.reused:
                    shutil.rmtree(checkpoint.path)
                raise
        return checkpoint


def planned_proof(
    config: Mapping[str, Any],
    model: Model,
    verify: CheckSpec,
    place: Destination,
    progress: Progress,
    *,
    windows: bool = True,
) -> Proof:
    """The check of a checkpoint with `config` made of `model`; raises what `plan_check` does when that cannot be.

    `windows`: see CheckPlan.
    """
    return Proof(replace(plan_check(config, model.path, verify, progress=progress), windows=windows), place, progress)


def _outcome(stage: Stage) -> str:
    return f"{stage.name}: difference {stage.differences.relative:.2g}"

"""The plan of a conversion, whichever tool runs it: what becomes of a model, where it goes, and its numerical check."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trtserve.artifacts import Checkpoint, Manifest, Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.unified import read_config
from trtserve.errors import TrtserveError
from trtserve.pipeline.stages import StageNeeds, StageSummary, summary
from trtserve.process import Command
from trtserve.progress import SILENT, Progress
from trtserve.specs import CheckSpec, ConvertSpec
from trtserve.store import Store, publish, withdraw

if TYPE_CHECKING:
    from trtserve.pipeline.parity import CheckPlan

SCHEMA = 5


@dataclass(frozen=True, kw_only=True)
class ConversionPlan(ABC):
    """A conversion before it begins."""

    by_nvidia: ClassVar[bool]
    """Whether NVIDIA's tool writes the checkpoint: its config is known only then, and names no sliding windows."""

    asked: ConvertSpec  # as the user gave it
    spec: ConvertSpec  # with dtype and release decided, and without what makes no difference
    model: Model
    name: str
    store: Store
    path: Path  # of the checkpoint
    reused: bool  # it exists
    fingerprint: str
    config: CheckpointConfig  # of the checkpoint; what is expected of NVIDIA's tools
    sizes: Sequence[int]  # bytes of each rank's file; what is expected of NVIDIA's tools
    verify: CheckSpec | None = None  # compare the checkpoint with the model before it is published, or reused
    left_out: Sequence[str] = ()  # tensors that the index does not name, or that --ignore-tensors matches

    @property
    def total_bytes(self) -> int:
        """Bytes of all rank files."""
        return sum(self.sizes)

    @property
    def largest_tensor(self) -> int:
        """Bytes of the largest source tensor, or 0 where it is unknown."""
        return 0

    @property
    @abstractmethod
    def source(self) -> str:
        """What is converted, in words."""

    @property
    def artifact(self) -> Checkpoint:
        """The Checkpoint that `run` returns; it need not exist yet."""
        return Checkpoint(path=self.path, manifest=self.manifest)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the checkpoint; a run adds what it measures."""
        settings, tools, facts = self.recorded()
        return Manifest(
            kind="checkpoint",
            name=self.name,
            fingerprint=self.fingerprint,
            inputs={self.model.name: self.model.fingerprint},
            spec=settings,
            tools=tools,
            facts={"model": str(self.model.path.absolute()), **facts},
        )

    @property
    @abstractmethod
    def needs(self) -> StageNeeds:
        """Disk, memory and time of a conversion."""

    def command(self, folder: Path) -> Command | None:
        """Return the external command that writes the checkpoint to `folder`, if there is one."""
        return None

    def describe(self) -> StageSummary:
        """Return the stage as a dry run shows it."""
        command = self.command(self.path)
        return summary("convert", self.path, self.total_bytes, done=self.reused, command=command)

    def run(self, progress: Progress = SILENT) -> Checkpoint:
        """Write the checkpoint, or reuse the one that exists; with `verify` compare it with the model.

        Raises ConversionError, CorruptFileError, MemoryLimitError or DiskSpaceError, and with `verify` what
        `plan_check` and `require_passed` raise; nothing is left behind then.
        """
        if self.reused:
            progress.step(f"Checkpoint {self.path} is reused")
        self.report(progress)
        check = None if self.by_nvidia else self._planned_check(self.config, progress)
        passed = False

        def produce(folder: Path) -> Manifest:
            nonlocal passed
            config, facts = self.write(folder, progress)
            planned = check or self._planned_check(config, progress)
            if planned is not None:
                facts["check"] = self._checked(planned, folder, progress)
                passed = True
            return replace(self.manifest, facts={**self.manifest.facts, **facts})

        checkpoint = publish(Checkpoint, self.path, self.manifest, produce)
        if self.verify is None or passed:
            return checkpoint
        planned = check or self._planned_check(read_config(checkpoint.path), progress)
        if planned is not None:
            try:
                self._checked(planned, checkpoint.path, progress)
            except TrtserveError:
                if not self.reused:  # it is linked from another name
                    withdraw(checkpoint)
                raise
        return checkpoint

    @abstractmethod
    def recorded(self) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
        """Return the settings, tools and facts of the manifest."""

    @abstractmethod
    def report(self, progress: Progress) -> None:
        """Report what a user may not expect."""

    @abstractmethod
    def write(self, folder: Path, progress: Progress) -> tuple[CheckpointConfig, dict[str, Any]]:
        """Fill `folder`; return the checkpoint's config, and facts for its manifest."""

    def _planned_check(self, config: CheckpointConfig, progress: Progress) -> CheckPlan | None:
        if self.verify is None:
            return None
        from trtserve.pipeline.parity import plan_check  # loads the runtimes

        plan = plan_check(config, self.model.path, self.verify, progress=progress)
        return replace(plan, windows=not self.by_nvidia)

    def _checked(self, plan: CheckPlan, folder: Path, progress: Progress) -> dict[str, Any]:
        """Compare the checkpoint in `folder` with the model; return the figures.

        Raises CheckError when they exceed their bounds.
        """
        from trtserve.pipeline.parity import require_passed, run_check

        report = replace(run_check(plan, folder, progress=progress), path=self.path)
        require_passed(report)
        stages = ", ".join(f"{stage.name}: difference {stage.differences.relative:.2g}" for stage in report.stages)
        progress.step(f"The checkpoint matches the model ({stages})")
        return {key: value for key, value in report.described().items() if key not in ("path", "against")}


def all_settings(spec: ConvertSpec) -> dict[str, Any]:
    """Return the fields of `spec` as JSON."""
    examples = str(spec.trtllm_examples) if spec.trtllm_examples else None
    lists = {name: list(getattr(spec, name)) for name in ("converter_flags", "container_flags", "ignore_tensors")}
    return {**asdict(spec), "trtllm_examples": examples, **lists}


def smaller_checkpoint(dtype: str) -> str:
    """Suggest how to make our checkpoint smaller: it stores floats whatever the engine quantises."""
    return "--dtype bfloat16 or float16 makes it half as large." if dtype == "float32" else ""

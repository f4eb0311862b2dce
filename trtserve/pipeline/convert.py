"""The convert stage: Hugging Face model → TensorRT-LLM unified checkpoint, by our own converter or NVIDIA's.

A checkpoint is `config.json` and one `rankN.safetensors` per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtserve.artifacts import Checkpoint, Manifest, Model, fingerprint
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.source import read_hf_config
from trtserve.checkpoint.unified import read_config
from trtserve.errors import TrtserveError
from trtserve.pipeline import StageNeeds, StageSummary, destination, summary
from trtserve.pipeline.convert_own import OwnConversion, plan_own_conversion
from trtserve.progress import SILENT, Progress
from trtserve.specs import CheckSpec, ConvertSpec
from trtserve.store import Store, publish, require_name, withdraw

if TYPE_CHECKING:
    from trtserve.pipeline.convert_nvidia import NvidiaConversion
    from trtserve.pipeline.parity import CheckPlan

SCHEMA = 5


@dataclass(frozen=True, kw_only=True)
class ConversionPlan:
    """A conversion before it begins: what a converter makes of a model, and where it goes."""

    work: OwnConversion | NvidiaConversion
    model: Model
    name: str
    store: Store
    path: Path  # of the checkpoint
    reused: bool  # it exists
    fingerprint: str
    verify: CheckSpec | None = None  # compare the checkpoint with the model before it is published, or reused

    @property
    def by_nvidia(self) -> bool:
        """Whether NVIDIA's tool writes the checkpoint: its config is known only then, and names no sliding windows."""
        return self.work.BY_NVIDIA

    @property
    def config(self) -> CheckpointConfig:
        """Config of the checkpoint; what is expected of NVIDIA's tools."""
        return self.work.config

    @property
    def total_bytes(self) -> int:
        """Bytes of all rank files; what is expected of NVIDIA's tools."""
        return sum(self.work.sizes)

    @property
    def artifact(self) -> Checkpoint:
        """The Checkpoint that `run` returns; it need not exist yet."""
        return Checkpoint(path=self.path, manifest=self.manifest)

    @cached_property
    def manifest(self) -> Manifest:
        """Manifest of the checkpoint; a run adds what it measures."""
        settings, tools, facts = self.work.recorded()
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
    def needs(self) -> StageNeeds:
        """Disk, memory and time of a conversion."""
        return self.work.needs(self.store)

    def describe(self) -> StageSummary:
        """Return the stage as a dry run shows it."""
        command = self.work.command(self.path)
        return summary("convert", self.path, self.total_bytes, done=self.reused, command=command)

    def run(self, progress: Progress = SILENT) -> Checkpoint:
        """Write the checkpoint, or reuse the one that exists; with `verify` compare it with the model.

        Raises ConversionError, CorruptFileError, MemoryLimitError or DiskSpaceError, and with `verify` what
        `plan_check` and `require_passed` raise; nothing is left behind then.
        """
        if self.reused:
            progress.step(f"Checkpoint {self.path.name} is reused")
        check = None if self.by_nvidia else self._planned_check(self.config, progress)
        self.work.report(progress, reused=self.reused)
        passed = False

        def produce(folder: Path) -> Manifest:
            nonlocal passed
            log = self.store.root / "logs" / f"convert-{self.path.name}.log"
            config, facts = self.work.write(folder, self.store, log, progress)
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


def plan_conversion(
    model: Model,
    spec: ConvertSpec,
    *,
    name: str | None = None,
    out: Path | None = None,
    store: Store | None = None,
    verify: CheckSpec | None = None,
    files: Path | None = None,
) -> ConversionPlan:
    """Plan a conversion from configs and headers; only errors in the values of tensors are found later.

    `files` is the folder to read from, where the model is not published yet. Raises UnsupportedModelError,
    ConversionError, CorruptFileError, or UsageError for sizes that do not divide.
    """
    name, store = name or model.name, store or Store()
    require_name(name)
    work: OwnConversion | NvidiaConversion
    if spec.upstream:
        from trtserve.pipeline.convert_nvidia import plan_nvidia_conversion  # loads what launches processes

        work = plan_nvidia_conversion(model, spec, read_hf_config(files or model.path))
    else:
        work = plan_own_conversion(model, spec, files=files)
    digest = fingerprint(stage="convert", schema=SCHEMA, model=model.fingerprint, **work.identity)
    path, reused = destination(Checkpoint, name, digest, out=out, store=store)
    return ConversionPlan(
        work=work, model=model, name=name, store=store, path=path, reused=reused, fingerprint=digest, verify=verify
    )

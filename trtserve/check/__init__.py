"""Whether an artefact is what it was made from: a checkpoint beside its original, number by number.

One command for every kind of artefact: `CHECKED` lists them, and each has a function that gives a report. That of model
repositories is in `check.repository`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtserve.architectures import family
from trtserve.architectures.checkpoint import CheckpointReader, require_files
from trtserve.artifacts import KINDS, Artifact, Checkpoint, Model, ModelRepository, load_artifact, looks_like
from trtserve.capacity.needs import check_memory
from trtserve.capacity.room import require_memory, to_be_mapped
from trtserve.check import constants, converted, original, rows
from trtserve.check.comparison import (
    Answer,
    Differences,
    Precision,
    Verdict,
    compare,
    described,
    verdicts,
)
from trtserve.check.converted import Changes, changes_of
from trtserve.check.original import Original
from trtserve.check.prompts import Tokens, Vocabulary, prompt_set
from trtserve.errors import ArtifactError, CheckError, ModelNotFoundError, UsageError
from trtserve.machine import gibibytes
from trtserve.progress import SILENT, Progress
from trtserve.specs import CheckSpec
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.check.comparison import Logits

__all__ = [
    "CHECKED",
    "CheckPlan",
    "CheckReport",
    "Stage",
    "check_checkpoint",
    "compare_checkpoint",
    "find_artifact",
    "find_original",
    "plan_check",
    "require_passed",
    "run_check",
]

# Kinds of artefacts that can be checked; a folder of another kind is refused by name.
CHECKED: tuple[type[Artifact], ...] = (Checkpoint, ModelRepository)

_HINTS = {
    "conversion": "Was it converted from that model? If so it must not be used: report the model's config.json with "
    "this message.",
    "precision": "The conversion itself is right, but this model loses too much in this precision: convert with "
    "another --dtype, or without --quantize.",
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One comparison. `conversion`: with the original's weights rounded as the checkpoint's are, so that nothing but a
    fault makes a difference. `precision`: with the original itself, so that the difference is what rounding costs.
    """

    name: Literal["conversion", "precision"]
    bounds: Precision
    differences: Differences
    verdicts: Sequence[Verdict]

    def described(self) -> dict[str, Any]:
        """The stage as JSON."""
        return {
            "stage": self.name,
            "bounds": self.bounds,
            **asdict(self.differences),
            "verdicts": [described(verdict) for verdict in self.verdicts],
        }


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The outcome of a check of `path` against `against`.

    `precision` names the bounds of what rounding may cost, and `reason` says why those. Weights that are not rounded
    have no stage `precision`.
    """

    path: Path
    against: Path
    precision: Precision
    reason: str
    prompts: int
    stages: Sequence[Stage]
    seconds: float

    @property
    def passed(self) -> bool:
        """True when no figure is beyond its bound."""
        return all(verdict.passed for stage in self.stages for verdict in stage.verdicts)

    def described(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "path": str(self.path),
            "against": str(self.against),
            "passed": self.passed,
            "precision": self.precision,
            "reason": self.reason,
            "prompts": self.prompts,
            "stages": [stage.described() for stage in self.stages],
            "seconds": round(self.seconds, 3),
        }


def find_artifact(text: str, store: Store | None = None, *, progress: Progress = SILENT) -> Artifact:
    """The artefact in the folder `text`, or the one made under that name; ArtifactError for a kind without a check."""
    folder, store = Path(text).expanduser(), store or Store()
    for kind in CHECKED:
        if looks_like(kind, folder) if folder.is_dir() else text in store.made(kind):
            return store.find(kind, text, progress=progress)
    if not folder.is_dir():
        raise store.unfound(text, *CHECKED)
    others = [name for kind, name in KINDS.items() if kind not in CHECKED and looks_like(kind, folder)]
    raise ArtifactError(
        f"{folder} is {f'of kind {others[0]}' if others else 'no artefact'}; these kinds can be checked: "
        f"{', '.join(KINDS[kind] for kind in CHECKED)}.",
        hint="Give the path that `trtserve convert` or `trtserve repo` printed.",
    )


def find_original(
    artifact: Artifact, text: str | None, store: Store | None = None, *, progress: Progress = SILENT
) -> Model:
    """The model named by `text`, else the one that the manifest says `artifact` was made of.

    UsageError when neither says; ModelNotFoundError when it is not there any more.
    """
    if text is not None:
        return (store or Store()).find(Model, text, progress=progress)
    recorded = (artifact.manifest.facts if artifact.manifest is not None else {}).get("model")
    if recorded is None:
        raise UsageError(
            f"{artifact.path} does not say what it was made of.", hint="Name the original: --against MODEL"
        )
    if not Path(recorded).is_dir():
        raise ModelNotFoundError(
            f"{artifact.path} was made of {recorded}, which is gone.", hint="Name the original: --against MODEL"
        )
    return Model(path=Path(recorded))


@dataclass(frozen=True, kw_only=True)
class CheckPlan:
    """A check before a model is loaded: what both are asked, what the conversion changes, the checkpoint's config.

    `windows` is False for checkpoints of NVIDIA's converters, which leave sliding windows to be given at start.
    """

    model: Path
    prompts: Sequence[Tokens]
    max_tokens: int
    changes: Changes
    config: Mapping[str, Any]
    windows: bool = True


def plan_check(
    config: Mapping[str, Any], model: Path, spec: CheckSpec | None = None, *, progress: Progress = SILENT
) -> CheckPlan:
    """Everything that can be known from a checkpoint's `config.json` and the folder of its original.

    MissingDependencyError without PyTorch or OpenVINO, UnsupportedModelError for what cannot be run here, UsageError
    for prompts that do not fit the model, MemoryLimitError when one of the two models does not fit this machine.
    """
    spec = spec or CheckSpec()
    original.require_oracle()
    converted.require_runtime()
    changes = changes_of(config, model)
    prompts = prompt_set(model, _vocabulary(config, spec), spec.prompts, progress=progress)
    require_room(config, prompts, spec, beside=converted.numbers_beside(config, model))
    return CheckPlan(model=model, prompts=prompts, max_tokens=spec.max_tokens, changes=changes, config=config)


def check_checkpoint(
    checkpoint: Path, model: Path, spec: CheckSpec | None = None, *, progress: Progress = SILENT
) -> CheckReport:
    """Run a checkpoint and its original on the same prompts and compare their logits.

    Files and headers come first: ArtifactError for a missing rank, CorruptFileError for a damaged one. Then it raises
    what `plan_check` raises, CorruptFileError for damaged tensors, and CheckError when the vocabularies differ.
    Figures beyond their bounds are in the report: see `require_passed`.
    """
    config = CheckpointReader(checkpoint).config
    require_files(checkpoint, config)
    plan = plan_check(config, model, spec, progress=progress)
    return run_check(replace(plan, windows=not _of_nvidia(checkpoint)), checkpoint, progress=progress)


def _of_nvidia(checkpoint: Path) -> bool:
    """Whether the manifest says that a converter of TensorRT-LLM made the checkpoint."""
    manifest = load_artifact(Checkpoint, checkpoint).manifest
    return manifest is not None and "tensorrt_llm" in manifest.tools


def run_check(plan: CheckPlan, checkpoint: Path, *, progress: Progress = SILENT) -> CheckReport:
    """Carry out `plan`: first the original, then the checkpoint, so that one of them is in memory at a time."""
    began = time.monotonic()
    said = original.run_original(
        plan.model, plan.prompts, max_tokens=plan.max_tokens, rounding=plan.changes.rounding, progress=progress
    )
    return CheckReport(
        path=checkpoint,
        against=plan.model,
        precision=plan.changes.precision,
        reason=plan.changes.reason,
        prompts=len(plan.prompts),
        stages=compare_checkpoint(plan, said, checkpoint, progress=progress),
        seconds=time.monotonic() - began,
    )


def compare_checkpoint(
    plan: CheckPlan, said: Original, checkpoint: Path, *, progress: Progress = SILENT
) -> list[Stage]:
    """Run the checkpoint on what the original was asked; one stage, or two when weights are rounded."""
    beside = _beside_logits(plan, said, checkpoint)
    stored = converted.logits_of(checkpoint, said.answers, progress=progress)
    rounded = [replace(answer, logits=logits) for answer, logits in zip(said.answers, said.rounded, strict=True)]
    experts = plan.changes.experts
    stages = []
    if plan.changes.conversion is not None:
        stages.append(_stage("conversion", plan.changes.conversion, rounded, stored, experts=experts))
    if plan.changes.quantised:
        stored = converted.logits_of(checkpoint, said.answers, quantised=True, progress=progress)
    if plan.changes.precision != "float32":
        stages.append(_stage("precision", plan.changes.precision, said.answers, stored, experts=experts))
    stages[0] = replace(stages[0], verdicts=[*stages[0].verdicts, *beside])
    return stages


def _stage(
    name: Literal["conversion", "precision"],
    bounds: Precision,
    answers: Sequence[Answer],
    logits: Sequence[Logits],
    *,
    experts: bool,
) -> Stage:
    differences = compare(answers, logits, bounds)
    judged = verdicts(differences, bounds, experts=experts)
    return Stage(name=name, bounds=bounds, differences=differences, verdicts=judged)


def _beside_logits(plan: CheckPlan, said: Original, checkpoint: Path) -> list[Verdict]:
    """What logits of a few prompts do not show, by value."""
    # The config of the folder, not that of the plan: it is a part of what is checked.
    reader = CheckpointReader(checkpoint)
    decoder = family(reader.config["architecture"]).decoder(reader.config)
    return [
        *constants.judged(reader.config, decoder, said.constants, windows=plan.windows),
        *rows.judged(reader, said.products, plan.changes.rows),
    ]


def _vocabulary(config: Mapping[str, Any], spec: CheckSpec) -> Vocabulary:
    """Prompts leave room for their answers in the positions that the model knows."""
    positions = config.get("max_position_embeddings")
    longest = int(positions) - spec.max_tokens if positions else 2**31
    if longest < 1:
        raise UsageError(f"--max-tokens is {spec.max_tokens}; the model knows {positions} positions.")
    return Vocabulary(size=int(config["vocab_size"]), longest=longest)


def require_room(config: Mapping[str, Any], prompts: Sequence[Tokens], spec: CheckSpec, *, beside: int) -> None:
    """MemoryLimitError, with the numbers, when a check does not fit the free memory; see `check_memory`."""
    need = check_memory(config, [len(prompt) + spec.max_tokens for prompt in prompts], beside=beside)
    require_memory(
        need.total,
        f"The check takes {gibibytes(need.original)} for the original in float32, then {gibibytes(need.converted)} for "
        f"the checkpoint, {gibibytes(need.logits)} for logits, {gibibytes(need.processes)} for PyTorch and OpenVINO: "
        "it needs",
        lambda _: "Check on a machine with more memory; shorter prompts (--prompts) need less for logits.",
        mapped=to_be_mapped("numpy", "transformers", "torch", "openvino"),
    )


def require_passed(report: CheckReport) -> None:
    """CheckError that names every figure beyond its bound."""
    failed = next((stage for stage in report.stages if not all(verdict.passed for verdict in stage.verdicts)), None)
    if failed is None:
        return
    beyond = [verdict for verdict in failed.verdicts if not verdict.passed]
    figures = ", ".join(f"{each.name} {each.value:.2g} ({each.relation} {each.bound:.2g})" for each in beyond)
    worst = failed.differences.worst
    raise CheckError(
        f"{report.path} is not the model in {report.against}: {figures}. The largest difference is at prompt "
        f"{worst.prompt}, position {worst.position}, token {worst.token}.",
        hint=_HINTS[failed.name],
    )

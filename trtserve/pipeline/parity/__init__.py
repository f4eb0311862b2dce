"""The numerical check: compare a checkpoint's logits and constants with its original model's.

`CHECKED` lists the kinds of artefacts that can be checked; each has a function that returns a report. Model
repositories are checked by `trtserve.repository.check`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtserve.artifacts import KINDS, Artifact, Checkpoint, Engine, Model, ModelRepository, load_artifact, looks_like
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import family
from trtserve.checkpoint.unified import CheckpointReader, require_files
from trtserve.errors import ArtifactError, CheckError, ModelNotFoundError, TrtserveError, UsageError
from trtserve.executor.loaders import read_engine_config
from trtserve.host.machine import format_bytes, require_memory, to_be_mapped
from trtserve.pipeline.memory import check_memory
from trtserve.pipeline.parity import constants, converted, original
from trtserve.pipeline.parity.comparison import Differences, Judgement, Precision, PromptLogits, compare, verdicts
from trtserve.pipeline.parity.converted import Changes, changes_of
from trtserve.pipeline.parity.original import Original, Tokens, Vocabulary, prompt_set
from trtserve.progress import SILENT, Progress
from trtserve.specs import CheckSpec
from trtserve.store import Store

if TYPE_CHECKING:
    from trtserve.pipeline.parity.comparison import Logits

# Kinds of artefacts that can be checked; folders of other kinds are refused by name.
CHECKED: tuple[type[Artifact], ...] = (Checkpoint, ModelRepository, Engine)

_HINTS = {
    "conversion": "Was it converted from that model? If so it must not be used: report the model's config.json with "
    "this message.",
    "precision": "The conversion itself is right, but this model loses too much in this precision: convert with "
    "another --dtype, or without --quantize.",
    "engine": "Its files, or its runtime on this machine, compute something else than the weights mean: build it "
    "again. If its checkpoint passes and a new engine does not, report both.",
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One comparison.

    `engine` runs the built engine and compares it with the original itself; the others run the checkpoint. `conversion`
    rounds the original's weights like the checkpoint's, so only a fault makes a difference. `precision`
    compares with the original itself, so the difference is the cost of rounding.
    """

    name: Literal["conversion", "precision", "engine"]
    bounds: Precision
    differences: Differences
    verdicts: Sequence[Judgement]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of checking `path` against `against`.

    `precision` names the bounds on the cost of rounding, `reason` explains them. Without rounded weights there is no
    stage `precision`.
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
        """True when every figure is within its bound."""
        return all(verdict.passed for stage in self.stages for verdict in stage.verdicts)

    def described(self) -> dict[str, Any]:
        stages = [
            {
                "stage": stage.name,
                "bounds": stage.bounds,
                **asdict(stage.differences),
                "verdicts": [{**asdict(verdict), "passed": verdict.passed} for verdict in stage.verdicts],
            }
            for stage in self.stages
        ]
        return {**asdict(self), "passed": self.passed, "stages": stages, "seconds": round(self.seconds, 3)}


def find_artifact(text: str, store: Store | None = None, *, progress: Progress = SILENT) -> Artifact:
    """Return the artefact in folder `text` or with that name. Raises ArtifactError for a kind without a check."""
    folder, store = Path(text).expanduser(), store or Store()
    for kind in CHECKED:
        if looks_like(kind, folder) if folder.is_dir() else text in store.by_name(kind):
            return store.find(kind, text, progress=progress)
    if not folder.is_dir():
        raise store.not_found_error(text, *CHECKED)
    others = [name for kind, name in KINDS.items() if kind not in CHECKED and looks_like(kind, folder)]
    raise ArtifactError(
        f"{folder} is {f'a {others[0]}' if others else 'not an artefact'}; these kinds can be checked: "
        f"{', '.join(KINDS[kind] for kind in CHECKED)}.",
        hint="Use the path printed by `trtserve convert` or `trtserve repo`.",
    )


def find_original(artifact: Artifact, text: str | None, *, progress: Progress = SILENT) -> Model:
    """Return the model named by `text`, or the one in the manifest of `artifact`.

    Raises UsageError when neither names one and ModelNotFoundError when it no longer exists.
    """
    if text is not None:
        return Store().find(Model, text, progress=progress)
    recorded = (artifact.manifest.facts if artifact.manifest is not None else {}).get("model")
    if recorded is None:
        raise UsageError(f"{artifact.path} does not record its original.", hint="Name the original: --against MODEL")
    if not Path(recorded).is_dir():
        raise ModelNotFoundError(
            f"{artifact.path} was made from {recorded}, which no longer exists.",
            hint="Name the original: --against MODEL",
        )
    return Model(path=Path(recorded))


@dataclass(frozen=True, kw_only=True)
class CheckPlan:
    """A check before any model is loaded: prompts, the conversion's changes, and the checkpoint's config.

    `windows` is False for checkpoints of NVIDIA's converters, which omit sliding windows.
    """

    model: Path
    prompts: Sequence[Tokens]
    max_tokens: int
    changes: Changes
    config: CheckpointConfig
    windows: bool = True


def plan_check(
    config: CheckpointConfig,
    model: Path,
    spec: CheckSpec | None = None,
    *,
    positions: int = 0,
    progress: Progress = SILENT,
) -> CheckPlan:
    """Plan a check from a checkpoint's `config.json` and its original's folder; an engine has fewer `positions`.

    Raises MissingDependencyError if PyTorch or OpenVINO is missing, UnsupportedModelError for models that cannot run
    here, and UsageError for prompts that do not fit the model, and MemoryLimitError when one of the two models does not
    fit.
    """
    spec = spec or CheckSpec()
    original.require_oracle()
    converted.require_runtime()
    changes = changes_of(config, model)
    prompts = prompt_set(model, _vocabulary(config, spec, positions), spec.prompts, progress=progress)
    require_check_memory(config, prompts, spec, beside=converted.numbers_beside(config, model))
    return CheckPlan(model=model, prompts=prompts, max_tokens=spec.max_tokens, changes=changes, config=config)


def check_engine(
    engine: Path, model: Path, spec: CheckSpec | None = None, *, progress: Progress = SILENT
) -> CheckReport:
    """Run a built engine and the original on the same prompts and compare their logits.

    The bounds are those of the coarsest of its weights, arithmetic and KV cache. Raises UnsupportedModelError for an
    engine that one process of ours does not run, and what `plan_check` raises.
    """
    began, config = time.monotonic(), read_engine_config(engine)
    converted.require_comparable(engine, config)
    plan = plan_check(config.model, model, spec, positions=config.build.max_seq_len, progress=progress)
    said = original.run_original(plan.model, plan.prompts, max_tokens=plan.max_tokens, rounding=None, progress=progress)
    stage = _engine_stage(plan, said, engine, progress)
    return CheckReport(
        path=engine,
        against=model,
        precision=stage.bounds,
        reason=plan.changes.reason,
        prompts=len(plan.prompts),
        stages=[stage],
        seconds=time.monotonic() - began,
    )


def verify_engine(engine: Engine, model: Model, spec: CheckSpec, *, progress: Progress = SILENT) -> None:
    """Compare an engine that was just built with its original. Raises what `check_engine` and `require_passed` raise.

    One that another program or several processes run is left out, and `progress` says so.
    """
    if not _is_own(engine.path):
        progress.warn(f"The engine {engine.path} is not compared with the original; its checkpoint was.")
        return
    report = check_engine(engine.path, model.path, spec, progress=progress)
    require_passed(report)
    found = report.stages[0]
    progress.step(f"The engine matches the model ({found.bounds}: difference {found.differences.relative:.2g})")


def _engine_stage(plan: CheckPlan, said: Original, engine: Path, progress: Progress) -> Stage:
    config = read_engine_config(engine)
    logits = converted.logits_of_engine(engine, config, said.answers, progress=progress)
    bounds = converted.bounds_of(config, plan.changes.precision)
    return _stage("engine", bounds, said.answers, logits, experts=plan.changes.experts)


def engine_made_of(checkpoint: Artifact, store: Store | None = None) -> Path | None:
    """Return the newest engine in the store that was built from this checkpoint and can be compared, or None."""
    made = [
        (each.manifest.created, each.path)
        for each in (store or Store()).complete(Engine)
        if each.manifest is not None and checkpoint.fingerprint in each.manifest.inputs.values()
    ]
    own = [(created, path) for created, path in made if _is_own(path)]
    return max(own)[1] if own else None


def _is_own(engine: Path) -> bool:
    with suppress(TrtserveError):  # an engine of TensorRT-LLM
        return converted.obstacle(read_engine_config(engine)) is None
    return False


def check_checkpoint(
    checkpoint: Path,
    model: Path,
    spec: CheckSpec | None = None,
    *,
    engine: Path | None = None,
    progress: Progress = SILENT,
) -> CheckReport:
    """Run a checkpoint, its original and an engine made of it on the same prompts and compare their logits.

    Files and headers are checked first: ArtifactError for a missing rank, CorruptFileError for a damaged one. Then
    raises the errors of `plan_check`, CorruptFileError for damaged tensors, and CheckError when the vocabularies
    differ. The report lists figures beyond their bounds; see `require_passed`.
    """
    config = CheckpointReader(checkpoint).config
    require_files(checkpoint, config)
    positions = read_engine_config(engine).build.max_seq_len if engine else 0
    plan = plan_check(config, model, spec, positions=positions, progress=progress)
    manifest = load_artifact(Checkpoint, checkpoint).manifest
    of_nvidia = manifest is not None and "tensorrt_llm" in manifest.tools
    return run_check(replace(plan, windows=not of_nvidia), checkpoint, engine=engine, progress=progress)


def run_check(
    plan: CheckPlan, checkpoint: Path, *, engine: Path | None = None, progress: Progress = SILENT
) -> CheckReport:
    """Run `plan`: the original first, then the checkpoint, then the engine, so that only one is in memory."""
    began = time.monotonic()
    said = original.run_original(
        plan.model, plan.prompts, max_tokens=plan.max_tokens, rounding=plan.changes.rounding, progress=progress
    )
    stages = compare_checkpoint(plan, said, checkpoint, progress=progress)
    if engine is not None:
        stages.append(_engine_stage(plan, said, engine, progress))
    return CheckReport(
        path=checkpoint,
        against=plan.model,
        precision=plan.changes.precision,
        reason=plan.changes.reason,
        prompts=len(plan.prompts),
        stages=stages,
        seconds=time.monotonic() - began,
    )


def compare_checkpoint(
    plan: CheckPlan, said: Original, checkpoint: Path, *, progress: Progress = SILENT
) -> list[Stage]:
    """Run the checkpoint on the original's tokens; one stage, or two when weights are rounded."""
    # Use the folder's config, which is part of what is checked, not the plan's.
    reader = CheckpointReader(checkpoint)
    decoder = family(reader.config.architecture).decoder(reader.config)
    beside = [
        *constants.judged_constants(reader.config, decoder, said.constants, windows=plan.windows),
        *constants.judged_rows(reader, said.products, plan.changes.rows),
    ]
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
    name: Literal["conversion", "precision", "engine"],
    bounds: Precision,
    answers: Sequence[PromptLogits],
    logits: Sequence[Logits],
    *,
    experts: bool,
) -> Stage:
    differences = compare(answers, logits, bounds)
    judged = verdicts(differences, bounds, experts=experts)
    return Stage(name=name, bounds=bounds, differences=differences, verdicts=judged)


def _vocabulary(config: CheckpointConfig, spec: CheckSpec, positions: int) -> Vocabulary:
    """Return the prompts' limits, leaving room for answers within the positions of the engine, or of the model."""
    positions = positions or int(config.max_position_embeddings or 0)
    longest = int(positions) - spec.max_tokens if positions else 2**31
    if longest < 1:
        raise UsageError(f"--max-tokens is {spec.max_tokens}; the model has {positions} positions.")
    return Vocabulary(size=int(config.vocab_size), longest=longest)


def require_check_memory(config: CheckpointConfig, prompts: Sequence[Tokens], spec: CheckSpec, *, beside: int) -> None:
    """Raise MemoryLimitError when a check does not fit the free memory; see `check_memory`."""
    need = check_memory(config, [len(prompt) + spec.max_tokens for prompt in prompts], beside=beside)
    require_memory(
        need.total,
        f"The check takes {format_bytes(need.original)} for the original in float32, then "
        f"{format_bytes(need.converted)} for "
        f"the checkpoint, {format_bytes(need.logits)} for logits, {format_bytes(need.processes)} for PyTorch "
        f"and OpenVINO: "
        "it needs",
        lambda _: "Check on a machine with more memory; shorter prompts (--prompts) need less for logits.",
        mapped=to_be_mapped("numpy", "transformers", "torch", "openvino"),
    )


def require_passed(report: CheckReport) -> None:
    """Raise CheckError naming every figure beyond its bound."""
    failed = next((stage for stage in report.stages if not all(verdict.passed for verdict in stage.verdicts)), None)
    if failed is None:
        return
    beyond = [verdict for verdict in failed.verdicts if not verdict.passed]
    figures = ", ".join(f"{each.name} {each.value:.2g} ({each.relation} {each.bound:.2g})" for each in beyond)
    worst = failed.differences.worst
    raise CheckError(
        f"{report.path} does not match the model in {report.against}: {figures}. The largest difference is at prompt "
        f"{worst.prompt}, position {worst.position}, token {worst.token}.",
        hint=_HINTS[failed.name],
    )

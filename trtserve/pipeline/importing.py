"""Run all import stages, reusing results that already exist."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from trtserve.artifacts import (
    MANIFEST,
    Engine,
    Model,
    ModelRepository,
)
from trtserve.errors import DiskSpaceError, MemoryLimitError
from trtserve.executor.runtimes import RUNTIMES
from trtserve.host.machine import format_bytes
from trtserve.host.resources import require_disk
from trtserve.pipeline import inventory
from trtserve.pipeline.build import plan_build, run_build
from trtserve.pipeline.convert import ConversionPlan, run_conversion
from trtserve.pipeline.gpu_fit import require_gpu_memory
from trtserve.pipeline.import_ import pull_model
from trtserve.pipeline.import_plan import (
    ImportPlan,
    Stage,
    plan_engine_repository,
    plan_import,
    plan_model_repository,
    plan_stages,
)
from trtserve.pipeline.import_spec import ImportSpec
from trtserve.pipeline.imported_names import record_of, take_name
from trtserve.pipeline.memory import require_enough_memory
from trtserve.progress import SILENT, Progress
from trtserve.repository.assembling import assemble_repository, check_tokenizer
from trtserve.store import Store

__all__ = [
    "ENGINE_DEST_PATH",
    "ImportPlan",
    "ImportSpec",
    "Stage",
    "engine_destination",
    "import_to_repository",
    "plan_import",
    "require_resources",
    "run_import",
    "warn_about_resources",
]

ENGINE_DEST_PATH = "ENGINE_DEST_PATH"


def engine_destination(name: str) -> Path | None:
    """Return `$ENGINE_DEST_PATH/<name>`, where engines outlive the store, or None when the variable is not set."""
    folder = os.environ.get(ENGINE_DEST_PATH)
    return (Path(folder).expanduser() / name).absolute() if folder else None


def import_to_repository(
    spec: ImportSpec,
    *,
    store: Store | None = None,
    token: str | None = None,
    record: bool = True,
    progress: Progress = SILENT,
) -> ModelRepository:
    """Plan an import, check that it fits this machine, and run it.

    Running it again reuses every stage whose inputs and settings are the same. Raises what the stages raise;
    stages that were finished before the error are kept and reused.
    """
    store = store or Store()
    draft = None if spec.draft is None else spec.draft.path
    with store.in_use(spec.name, spec.tokenizer, draft, spec.draft_tokenizer):
        plan = plan_import(spec, store=store, token=token, progress=progress)
        require_resources(plan)
        return run_import(plan, token=token, record=record, progress=progress)


def require_resources(plan: ImportPlan) -> None:
    """Raise DiskSpaceError or MemoryLimitError when `plan` does not fit this machine."""
    if not plan.builds:
        return
    spec, store, missing = plan.spec, plan.store, plan.model.missing_bytes
    checkpoint = plan.checkpoint_bytes if plan.converts else 0
    what = f"The files of {spec.name} ({format_bytes(missing)} to pull, {format_bytes(checkpoint)} checkpoint"
    quantized = spec.convert.quantize != "none" or bool(plan.model.config.get("quantization_config"))
    narrower = "" if quantized else RUNTIMES[plan.runtime].narrower
    smaller = f"{narrower} makes the engine smaller, not the checkpoint." if narrower else ""
    if spec.engine_out is None:
        require_disk(
            store.root,
            missing + checkpoint + plan.engine_bytes,
            f"{what}, {format_bytes(plan.engine_bytes)} engine)",
            option="TRTSERVE_HOME",
            smaller=smaller,
        )
    else:
        require_disk(store.root, missing + checkpoint, f"{what})", option="TRTSERVE_HOME")
        engine = f"The engine of {spec.name}"
        require_disk(spec.engine_out, plan.engine_bytes, engine, option=ENGINE_DEST_PATH, smaller=smaller)
    if plan.deployment is not None and plan.needs is not None:
        require_enough_memory(plan.deployment, plan.needs, spec.name)
        require_gpu_memory(plan.needs.engine, spec.build)


def warn_about_resources(plan: ImportPlan, progress: Progress) -> None:
    """Warn about what `require_resources` would raise. For dry runs, which may be for another machine."""
    try:
        require_resources(plan)
    except (DiskSpaceError, MemoryLimitError) as error:
        progress.warn(f"This machine is too small for the import. {error.message} {error.hint or ''}".rstrip())


def run_import(
    plan: ImportPlan, *, token: str | None = None, record: bool = True, progress: Progress = SILENT
) -> ModelRepository:
    """Run the stages of `plan`, planning stages whose inputs were not available earlier.

    Remember the repository under its name if `record`.
    """
    spec, store = plan.spec, plan.store
    if not plan.has_engine:
        loader = RUNTIMES[plan.runtime].folder_loader
        progress.step(f"Nothing is converted or built: {loader} loads the Hugging Face folder")
    model = pull_model(plan.model, token=token, progress=progress)
    if plan.has_engine and plan.conversion is None:
        plan = plan_stages(plan)
    checkpoint = engine = None
    try:
        if plan.conversion is not None:
            checkpoint, engine = plan.conversion.path, _make_engine(plan, plan.conversion, model, progress)
            repository = plan.repository if plan.build is not None and plan.build.path == engine.path else None
            repository = repository or plan_engine_repository(spec, model, engine, store)
        else:
            repository = plan.repository or plan_model_repository(plan, model, progress)
        made = assemble_repository(repository, progress)
    except KeyboardInterrupt:
        done = [row["stage"] for row in plan.stages() if row["path"] and (Path(row["path"]) / MANIFEST).exists()]
        progress.step(
            f"Interrupted. Completed stages were kept: {', '.join(done)}. Run the same command again to resume."
        )
        raise
    if record:
        engine_path = engine.path if engine else None
        take_name(record_of(spec, plan.model, model, made, checkpoint=checkpoint, engine=engine_path), store, progress)
    if spec.discard_intermediate and checkpoint is not None and checkpoint.is_dir():
        # Keep the engine, whose files the repository links, and the model, which would have to be pulled again.
        size = inventory.freed_bytes([checkpoint])
        inventory.remove(inventory.Removal(names=(), folders=(checkpoint,), kept=(), size=size), store=store)
        progress.step(f"Checkpoint discarded: {format_bytes(size)} freed")
    return made


def _make_engine(plan: ImportPlan, conversion: ConversionPlan, model: Model, progress: Progress) -> Engine:
    """Convert and build. An existing engine needs no checkpoint unless `--verify` compares it."""
    spec, build = plan.spec, plan.build
    if build is not None and build.reused and spec.verify is None:
        progress.step(
            f"Checkpoint {conversion.path} is reused" if conversion.reused else "No checkpoint is needed any more"
        )
        return run_build(build, progress)
    if plan.deployment is not None:
        # Fail on a broken tokenizer before the long work.
        check_tokenizer(spec.tokenizer_of(model), conversion.config.vocab_size)
    checkpoint = run_conversion(conversion, progress)
    if build is None or (conversion.toolkit is not None and not conversion.reused):
        # Use the config that NVIDIA's converter wrote; it may differ from the prediction.
        build = plan_build(checkpoint, spec.build, name=spec.name, out=spec.engine_out, store=plan.store)
    return run_build(replace(build, checkpoint=checkpoint), progress)

"""Import: plan all stages from model to repository in one pass, and run them, reusing results that already exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtserve.artifacts import Artifact, Engine, Model, ModelRepository, load_artifact
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.checkpoint.architectures import parameter_count
from trtserve.checkpoint.tensor_files import CODES, numpy_dtype
from trtserve.errors import DiskSpaceError, MemoryLimitError, TrtserveError, UnsupportedModelError
from trtserve.executor.runtimes import RUNTIMES, choose_runtime, draft_memory
from trtserve.host.machine import format_bytes, require_disk, require_memory
from trtserve.nvidia.releases.converters import require_converter
from trtserve.pipeline import StagePlan, StageSummary, inventory, summary
from trtserve.pipeline.build import BuildPlan, plan_build
from trtserve.pipeline.checkpoint_config import checkpoint_config, fp8_to_keep
from trtserve.pipeline.convert import ConversionPlan, plan_conversion
from trtserve.pipeline.gpu_fit import require_gpu_memory
from trtserve.pipeline.import_spec import (
    ENGINE_DEST_PATH,
    ImportSpec,
    llmapi_repository_spec,
    record_of,
    take_name,
    vllm_repository_spec,
)
from trtserve.pipeline.memory import Deployment, MemoryNeeds, memory_needs, require_enough_memory
from trtserve.pipeline.model import ModelPlan, plan_model
from trtserve.pipeline.model_files import GGUF, is_convertible
from trtserve.progress import SILENT, Progress
from trtserve.repository.assembling import (
    engine_models,
    plan_repository,
    plan_vllm_repository,
    require_fitting,
    require_vllm_serves,
)
from trtserve.repository.engines import read_engine
from trtserve.repository.llmapi import llmapi_models, plan_llmapi_repository, require_architecture
from trtserve.repository.profiles import profile
from trtserve.repository.publishing import RepositoryPlan, assemble_repository, require_addable_spec
from trtserve.repository.settings import resolve_settings, settings_of, spelled_as
from trtserve.repository.tokenizer import check_tokenizer, own_tokenizer_files
from trtserve.server.engine_fit import server_needs
from trtserve.specs.runtime import Runtime
from trtserve.store import Store, reusable, withdraw


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """The plan of an import, before anything is downloaded. A stage's plan is None until its inputs are available."""

    spec: ImportSpec
    store: Store
    runtime: str
    model: ModelPlan
    deployment: Deployment | None = None  # None without an engine whose size can be planned
    needs: MemoryNeeds | None = None  # of `deployment`
    conversion: ConversionPlan | None = None
    build: BuildPlan | None = None
    repository: RepositoryPlan | None = None
    hugging_face: EngineConfig | None = None  # of a model that its repository serves as an engine

    @property
    def has_engine(self) -> bool:
        """False where the runtime loads the Hugging Face folder."""
        return not RUNTIMES[self.runtime].folder_loader

    @property
    def builds(self) -> bool:
        """True when an engine must be built."""
        return self.has_engine and (self.build is None or not self.build.reused)

    @property
    def converts(self) -> bool:
        """True when a checkpoint must be made; an engine that exists needs none."""
        return self.builds and (self.conversion is None or not self.conversion.reused)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the checkpoint; its weights keep its dtype, even where the engine packs them."""
        if self.conversion is not None and self.conversion.total_bytes:
            return self.conversion.total_bytes
        if self.deployment is None:
            return self.model.weight_bytes
        config = checkpoint_config(self.model.config, self.spec.convert)
        return parameter_count(config) * numpy_dtype(CODES[config.dtype]).itemsize

    @property
    def engine_bytes(self) -> int:
        """Size of the engine; where it cannot be planned, the size of the weights."""
        return self.model.weight_bytes if self.needs is None else self.needs.engine.disk_bytes

    @property
    def memory_bytes(self) -> int | None:
        """Peak memory of build and server, or None where the engine cannot be planned."""
        if self.hugging_face is not None:
            return server_needs(self.hugging_face).total if self.hugging_face.trtserve.device == "cpu" else None
        # The memory of trtllm-build is an estimate: it is shown, but nothing is refused because of it.
        return None if self.needs is None else max(self.needs.total, self.needs.engine.peak_memory)

    def stages(self) -> list[StageSummary]:
        """Return the stages in order, as a dry run shows them."""
        rows = [self.model.describe()]
        if self.has_engine:
            rows += [
                _described("convert", self.conversion, self.checkpoint_bytes, done=not self.converts),
                _described("build", self.build, self.engine_bytes, done=not self.builds),
            ]
        path, done = (None, False) if self.repository is None else (self.repository.path, self.repository.reused)
        return [*rows, summary("repo", path, 0, done=done)]


def _described(stage: str, plan: StagePlan[Artifact] | None, size: int, *, done: bool) -> StageSummary:
    """Describe a stage that may have no plan yet, or that is not needed any more."""
    row = summary(stage, None, size, done=done) if plan is None else plan.describe()
    return summary(stage, plan.path if plan else None, size, done=done, command=row["command"])


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
        return run_import(plan, record=record, progress=progress)


def plan_import(
    spec: ImportSpec, *, store: Store | None = None, token: str | None = None, progress: Progress = SILENT
) -> ImportPlan:
    """Plan an import as far as it can be planned before the weights are here, and estimate the rest from `config.json`.

    Errors of all stages, including the last, are raised here: UsageError for settings, sizes and limits that cannot
    work, RepositoryError for a tokenizer or draft engine that does not fit, ArtifactError when a destination is taken,
    and what `plan_model`, `plan_conversion` and `plan_build` raise.
    """
    store = store or Store()
    runtime = choose_runtime(spec.build.runtime, progress, container=spec.build.container)
    _require_possible(spec, runtime)
    model = plan_model(
        spec.source,
        name=spec.name,
        store=store,
        token=token,
        own_tokenizer=spec.tokenizer is None,
        any_architecture=spec.any_architecture,
        progress=progress,
    )
    if spec.convert.keep_fp8 is None and runtime.keeps_fp8 and fp8_to_keep(model.config, spec.convert) is not None:
        spec = replace(spec, convert=replace(spec.convert, keep_fp8=True))
    plan = ImportPlan(spec=spec, store=store, runtime=runtime.name, model=model)
    if not plan.has_engine and any(file.name == GGUF for file in model.files):
        raise UnsupportedModelError(
            f"{spec.source} is a GGUF file, which {runtime.name} does not load here.",
            hint="Use --runtime openvino or torch, or import the original model.",
        )
    if runtime.folder_as_engine:
        made = require_vllm_serves(
            model.config,
            model.weight_bytes,
            spec.repository,
            files=[file.name for file in model.files],
            convert=spec.convert,
            build=spec.build,
        )
        plan = replace(plan, hugging_face=made)
    elif not plan.has_engine:
        require_architecture(model.config, llmapi_repository_spec(spec))
    if not plan.has_engine:
        return replace(
            plan, repository=_plan_repository(plan, model.artifact, None, progress) if model.reused else None
        )
    if not _only_nvidia_converts(spec, runtime, model.config):
        plan = replace(plan, deployment=_deployment(spec, model))
    if model.reused or model.folder is not None:
        plan = _plan_stages(plan, progress)
    if plan.deployment is not None:
        needs = memory_needs(plan.deployment, plan.build.engine if plan.build else None)
        plan = replace(plan, needs=needs)
        require_fitting(EngineConfig.of(needs.engine.config_outline()), spec.repository, draft=spec.draft)
    return plan


def _require_possible(spec: ImportSpec, runtime: Runtime) -> None:
    """Raise what can be known from the options alone: settings that cannot work, and destinations that are taken."""
    if runtime.folder_as_engine:
        asked = vllm_repository_spec(spec)
        models = engine_models(asked, draft=False)
        if spec.out is not None:
            reusable(ModelRepository, spec.out, "")
    elif not runtime.folder_loader:
        asked = spec.repository
        models = engine_models(asked, draft=spec.draft is not None)
        resolve_settings(settings_of(asked), profile(asked.release), spelled=spelled_as(asked))
        if spec.engine_out is not None:
            reusable(Engine, spec.engine_out, "")  # raises if something else is in its place
        if spec.out is not None:
            reusable(ModelRepository, spec.out, "")
    else:
        asked = llmapi_repository_spec(spec)
        models = llmapi_models(asked)
    if spec.into is not None:
        require_addable_spec(spec.into, asked, models, runtime=runtime.name)
    if spec.tokenizer is not None:
        own_tokenizer_files(spec.tokenizer)


def _only_nvidia_converts(spec: ImportSpec, runtime: Runtime, config: Mapping[str, Any]) -> bool:
    """Return whether only NVIDIA's converter supports the model.

    Raises UnsupportedModelError when no tool converts the model, or when the embedded runtime cannot run it.
    """
    if spec.convert.converter != "upstream" or is_convertible(config):
        return False
    runtime.require_model(config)
    if spec.convert.trtllm_script is None:
        require_converter(str(config["architectures"][0]))
    return True


def _deployment(spec: ImportSpec, model: ModelPlan) -> Deployment:
    asked = spec.repository
    kv_tokens = asked.max_tokens_in_paged_kv_cache
    return Deployment(
        hf=model.config,
        convert=spec.convert,
        build=spec.build,
        kv_tokens=kv_tokens,
        tokenizers=asked.preprocessing_instance_count + asked.postprocessing_instance_count,
        bls=asked.bls_instance_count or 1,
        tokenizer_bytes=next((file.size for file in model.files if file.name == "tokenizer.json"), 0),
        draft=draft_memory(read_engine(spec.draft.path), kv_tokens) if spec.draft else 0,
    )


def _plan_stages(plan: ImportPlan, progress: Progress) -> ImportPlan:
    """Plan conversion, build and repository of a model whose files are on this machine.

    The build needs the config of the checkpoint, which is known beforehand unless only NVIDIA's converter knows the
    architecture. The repository needs the files of engine and model: it is planned here only if both exist.
    """
    spec, store, model = plan.spec, plan.store, plan.model
    conversion = plan_conversion(
        model.artifact,
        spec.convert,
        name=spec.name,
        store=store,
        verify=spec.verify,
        files=model.folder if model.folder is not None and model.folder.is_dir() and not model.reused else None,
    )
    build = repository = None
    if plan.deployment is not None or conversion.reused:
        build = plan_build(
            conversion.artifact,
            spec.build,
            name=spec.name,
            out=spec.engine_out,
            store=store,
            # Prefer the config that NVIDIA's converter wrote.
            config=None if conversion.reused and conversion.by_nvidia else conversion.config,
        )
    if build is not None and build.reused and model.reused:
        repository = _plan_repository(plan, model.artifact, load_artifact(Engine, build.path), progress)
    return replace(plan, conversion=conversion, build=build, repository=repository)


def _plan_repository(plan: ImportPlan, model: Model, engine: Engine | None, progress: Progress) -> RepositoryPlan:
    """Plan the repository of an engine, or of a model that is served as it is; the files of both must exist."""
    spec = plan.spec
    if RUNTIMES[plan.runtime].folder_as_engine:
        return plan_vllm_repository(
            model,
            spec.repository,
            convert=spec.convert,
            build=spec.build,
            tokenizer=spec.tokenizer,
            out=spec.out,
            into=spec.into,
            store=plan.store,
        )
    if engine is None:
        return plan_llmapi_repository(
            model,
            llmapi_repository_spec(spec),
            tp_size=spec.convert.tp_size,
            pp_size=spec.convert.pp_size,
            out=spec.out,
            into=spec.into,
            store=plan.store,
            progress=progress,
        )
    return plan_repository(
        engine,
        spec.tokenizer or model.path,
        spec.repository,
        draft=spec.draft,
        draft_tokenizer=spec.draft_tokenizer,
        out=spec.out,
        into=spec.into,
        store=plan.store,
    )


def require_resources(plan: ImportPlan) -> None:
    """Raise DiskSpaceError or MemoryLimitError when `plan` does not fit this machine."""
    if plan.hugging_face is not None:
        _require_to_serve(plan, plan.hugging_face)
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


def _require_to_serve(plan: ImportPlan, config: EngineConfig) -> None:
    """Raise DiskSpaceError or MemoryLimitError for a model whose weights do not fit disk or, on the CPU, memory."""
    name, missing = plan.spec.name, plan.model.missing_bytes
    require_disk(plan.store.root, missing, f"The files of {name}", option="TRTSERVE_HOME")
    needs = server_needs(config, kv_tokens=plan.spec.repository.max_tokens_in_paged_kv_cache)
    if config.trtserve.device == "cpu":
        require_memory(
            needs.total,
            f"Serving {name} takes {format_bytes(needs.engine)} for vLLM with the weights, {format_bytes(needs.kv)} "
            f"for a KV cache of {needs.kv_tokens} tokens and {format_bytes(needs.processes)} for Triton: it needs",
            lambda _: "Set a smaller --max-seq-len or --max-tokens-in-paged-kv-cache, or use a smaller model.",
        )


def warn_about_resources(plan: ImportPlan, progress: Progress) -> None:
    """Warn about what `require_resources` would raise. For dry runs, which may be for another machine."""
    try:
        require_resources(plan)
    except (DiskSpaceError, MemoryLimitError) as error:
        progress.warn(f"This machine is too small for the import. {error.message} {error.hint or ''}".rstrip())


def run_import(plan: ImportPlan, *, record: bool = True, progress: Progress = SILENT) -> ModelRepository:
    """Run the stages of `plan`, planning stages whose inputs were not available earlier.

    Remember the repository under its name if `record`.
    """
    spec, store = plan.spec, plan.store
    if not plan.has_engine:
        loader = RUNTIMES[plan.runtime].folder_loader
        progress.step(f"Nothing is converted or built: {loader} loads the Hugging Face folder")
    model = plan.model.run(progress)
    # The folder that was made of a GGUF file is gone: its conversion reads the model.
    unfolded = plan.model.folder is not None and not plan.model.folder.is_dir()
    if plan.has_engine and (plan.conversion is None or unfolded):
        plan = _plan_stages(plan, progress)
    checkpoint = engine = None
    if plan.conversion is not None:
        checkpoint, engine = plan.conversion.path, _make_engine(plan, plan.conversion, model, progress)
    known = engine is None or (plan.build is not None and plan.build.path == engine.path)
    repository = (plan.repository if known else None) or _plan_repository(plan, model, engine, progress)
    made = assemble_repository(repository, progress)
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
    """Convert and build. An existing engine needs no checkpoint unless `--verify` compares both."""
    spec, build = plan.spec, plan.build
    if build is not None and build.reused and spec.verify is None:
        progress.step(
            f"Checkpoint {conversion.path.name} is reused" if conversion.reused else "No checkpoint is needed any more"
        )
        return build.run(progress)
    if plan.deployment is not None:
        # Fail on a broken tokenizer before the long work.
        check_tokenizer(spec.tokenizer or model.path, conversion.config.vocab_size)
    checkpoint = conversion.run(progress)
    if build is None or (conversion.by_nvidia and not conversion.reused):
        # Use the config that NVIDIA's converter wrote; it may differ from the prediction.
        build = plan_build(checkpoint, spec.build, name=spec.name, out=spec.engine_out, store=plan.store)
    engine = replace(build, checkpoint=checkpoint).run(progress)
    if spec.verify is not None:
        from trtserve.pipeline.parity import verify_engine  # loads the runtimes

        try:
            verify_engine(engine, model, spec.verify, progress=progress)
        except TrtserveError:
            if not build.reused:
                withdraw(engine)
            raise
    return engine

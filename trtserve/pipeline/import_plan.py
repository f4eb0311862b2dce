"""The plan of an import: each stage is planned once, as soon as its inputs are on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from trtserve.artifacts import (
    Engine,
    Model,
    ModelRepository,
    load_artifact,
)
from trtserve.checkpoint.architectures import parameter_count
from trtserve.checkpoint.tensor_files import CODES, numpy_dtype
from trtserve.executor.runtimes import RUNTIMES, choose_runtime
from trtserve.executor.steps import draft_memory
from trtserve.nvidia.releases.converters import require_converter
from trtserve.pipeline.build import BuildPlan, plan_build
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.pipeline.convert import ConversionPlan, plan_conversion
from trtserve.pipeline.import_ import ModelPlan, plan_model
from trtserve.pipeline.import_.model_plan import is_convertible
from trtserve.pipeline.import_spec import ImportSpec
from trtserve.pipeline.llmapi_import import llmapi_repository_spec
from trtserve.pipeline.memory import Deployment, MemoryNeeds, memory_needs
from trtserve.progress import SILENT, Progress
from trtserve.repository.assembling import (
    RepositoryPlan,
    engine_models,
    own_tokenizer_files,
    plan_repository,
    require_addable_spec,
    require_fitting,
)
from trtserve.repository.engines import read_engine
from trtserve.repository.llmapi import llmapi_models, plan_llmapi_repository
from trtserve.repository.profiles import profile
from trtserve.repository.settings import resolve_settings, settings_of, spelled_as
from trtserve.store import Store, reusable


class Stage(TypedDict):
    """One stage of a planned import, as a dry run shows it."""

    stage: str
    action: Literal["make", "reuse"]
    path: str | None  # None while it depends on files that are not downloaded yet
    bytes: int  # that the stage would write
    command: str | None  # that the stage would run


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

    @property
    def has_engine(self) -> bool:
        """False for the LLM API, which loads the Hugging Face folder."""
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
        # The memory of trtllm-build is an estimate: it is shown, but nothing is refused because of it.
        return None if self.needs is None else max(self.needs.total, self.needs.engine.peak_memory)

    def stages(self) -> list[Stage]:
        """Return the stages in order, as a dry run shows them."""
        model, conversion, build, repository = self.model, self.conversion, self.build, self.repository
        rows = [_row("model", model.path, model.missing_bytes, done=model.reused)]
        if self.has_engine:
            checkpoint = conversion.path if conversion else None
            converter = builder = None
            if conversion is not None and conversion.toolkit is not None:
                from trtserve.pipeline.convert.nvidia import converter_command

                converter = converter_command(conversion, conversion.path)
            if conversion is not None and build is not None:
                builder = build.engine.command(conversion.path, build.path)
            rows += [
                _row("convert", checkpoint, self.checkpoint_bytes, done=not self.converts, command=converter),
                _row("build", build.path if build else None, self.engine_bytes, done=not self.builds, command=builder),
            ]
        path, done = (None, False) if repository is None else (repository.path, repository.reused)
        return [*rows, _row("repo", path, 0, done=done)]


def _row(name: str, path: Path | None, size: int, *, done: bool, command: object = None) -> Stage:
    return Stage(
        stage=name,
        action="reuse" if done else "make",
        path=str(path) if path else None,
        bytes=0 if done else size,
        command=None if done or command is None else str(command),
    )


def plan_import(
    spec: ImportSpec, *, store: Store | None = None, token: str | None = None, progress: Progress = SILENT
) -> ImportPlan:
    """Plan an import as far as it can be planned before the weights are here, and estimate the rest from `config.json`.

    Errors of all stages, including the last, are raised here: UsageError for settings, sizes and limits that cannot
    work, RepositoryError for a tokenizer or draft engine that does not fit, ArtifactError when a destination is taken,
    and what `plan_model`, `plan_conversion` and `plan_build` raise.
    """
    store = store or Store()
    chosen = choose_runtime(spec.build.runtime, progress, container=spec.build.container)
    runtime = chosen.name
    if chosen.folder_loader:
        return _plan_llmapi_import(spec, runtime, store, token, progress)
    asked = spec.repository
    resolve_settings(settings_of(asked), profile(asked.release), spelled=spelled_as(asked))
    if spec.engine_out is not None:
        reusable(Engine, spec.engine_out, "")  # raises if something else is in its place
    if spec.out is not None:
        reusable(ModelRepository, spec.out, "")
    if spec.into is not None:
        require_addable_spec(spec.into, asked, engine_models(asked, draft=spec.draft is not None), runtime=runtime)
    if spec.tokenizer is not None:
        own_tokenizer_files(spec.tokenizer)
    model = plan_model(
        spec.source,
        name=spec.name,
        store=store,
        token=token,
        own_tokenizer=spec.tokenizer is None,
        any_architecture=spec.convert.converter == "upstream",
        progress=progress,
    )
    plan = ImportPlan(spec=spec, store=store, runtime=runtime, model=model)
    if not _only_nvidia_converts(spec, runtime, model.config):
        plan = replace(plan, deployment=_deployment(spec, model))
    if model.reused or model.folder is not None:
        plan = plan_stages(plan)
    if plan.deployment is not None:
        needs = memory_needs(plan.deployment, plan.build.engine if plan.build else None)
        plan = replace(plan, needs=needs)
        require_fitting(needs.engine.config_outline(), asked, draft=spec.draft)
    return plan


def plan_stages(plan: ImportPlan) -> ImportPlan:
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
        files=None if model.reused else model.folder,
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
            config=None if conversion.reused and conversion.toolkit is not None else conversion.config,
        )
    if build is not None and build.reused and model.reused:
        engine = Engine(path=build.path, manifest=load_artifact(Engine, build.path).manifest)
        repository = plan_engine_repository(spec, model.artifact, engine, store)
    return replace(plan, conversion=conversion, build=build, repository=repository)


def plan_engine_repository(spec: ImportSpec, model: Model, engine: Engine, store: Store) -> RepositoryPlan:
    """Plan the repository of an existing engine."""
    return plan_repository(
        engine,
        spec.tokenizer_of(model),
        spec.repository,
        draft=spec.draft,
        draft_tokenizer=spec.draft_tokenizer,
        out=spec.out,
        into=spec.into,
        store=store,
    )


def _only_nvidia_converts(spec: ImportSpec, runtime: str, config: Mapping[str, Any]) -> bool:
    """Return whether only NVIDIA's converter supports the model.

    Raises UnsupportedModelError when no tool converts the model, or when the embedded runtime cannot run it.
    """
    if spec.convert.converter != "upstream" or is_convertible(config):
        return False
    RUNTIMES[runtime].require_model(config)
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


def _plan_llmapi_import(
    spec: ImportSpec, runtime: str, store: Store, token: str | None, progress: Progress
) -> ImportPlan:
    asked = llmapi_repository_spec(spec)
    if spec.into is not None:
        require_addable_spec(spec.into, asked, llmapi_models(asked), runtime=runtime)
    model = plan_model(spec.source, name=spec.name, store=store, token=token, any_architecture=True, progress=progress)
    plan = ImportPlan(spec=spec, store=store, runtime=runtime, model=model)
    return replace(plan, repository=plan_model_repository(plan, model.artifact, progress)) if model.reused else plan


def plan_model_repository(plan: ImportPlan, model: Model, progress: Progress) -> RepositoryPlan:
    """Plan the repository of a model for the LLM API; its files must exist."""
    spec = plan.spec
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

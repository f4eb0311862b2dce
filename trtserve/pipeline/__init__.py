"""Import in one go: pull, convert, build and assemble, each step reused where its result exists."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from trtserve import inventory
from trtserve.architectures import parameter_count
from trtserve.architectures.tensor_files import CODES, numpy_dtype
from trtserve.artifacts import Checkpoint, Engine, Manifest, Model, ModelRepository, load_artifact
from trtserve.build import Plan as BuildPlan
from trtserve.build import build_engine, plan_build
from trtserve.capacity.gpu_room import require_gpu_room
from trtserve.capacity.needs import draft_memory
from trtserve.capacity.room import require_disk
from trtserve.capacity.wishes import Wish, need_of, require_wish
from trtserve.convert import Plan as Conversion
from trtserve.convert import checkpoint_config, convert_model, destination_of, plan_conversion
from trtserve.convert.upstream import upstream_command
from trtserve.import_ import ModelPlan, missing_bytes, model_destination, plan_model, pull_model
from trtserve.machine import gibibytes
from trtserve.pipeline.foreign import is_foreign, make_foreign_engine
from trtserve.pipeline.llmapi import for_llmapi, import_for_llmapi
from trtserve.pipeline.recorded import record_of, take_name
from trtserve.pipeline.spec import ImportSpec
from trtserve.pipeline.stages import Stage, planned_stage
from trtserve.progress import SILENT, Progress
from trtserve.repo import (
    RepositoryPlan,
    assemble_repository,
    check_tokenizer,
    engine_models,
    plan_repository,
    require_fitting,
    settings_of,
    tokenizer_files,
)
from trtserve.repo import require_room as require_repository_room
from trtserve.repo.engine import read_engine
from trtserve.repo.options import spelled_as
from trtserve.runtimes import choose_runtime
from trtserve.store import Store, reusable
from trtserve.triton.profiles import profile
from trtserve.triton.settings import resolve_settings

__all__ = [
    "ENGINE_DEST_PATH",
    "ImportPlan",
    "ImportSpec",
    "Stage",
    "engine_destination",
    "import_to_repository",
    "plan_import",
    "require_room",
]

ENGINE_DEST_PATH = "ENGINE_DEST_PATH"


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """An import before its first byte.

    `missing` counts bytes to be pulled. `conversion`, `build` and `repository` are known as far as their inputs are on
    this machine; `checkpoint_reused` and the plans' own fields say what exists already. Sizes are bytes. Of an
    architecture that only NVIDIA's converter knows, the engine is not planned: its sizes are those of the weights, and
    `memory_bytes` is None.
    """

    model: ModelPlan
    model_path: Path
    model_reused: bool
    missing: int
    checkpoint_bytes: int
    engine_bytes: int
    memory_bytes: int | None
    conversion: Conversion | None = None
    checkpoint_path: Path | None = None
    checkpoint_reused: bool = False
    build: BuildPlan | None = None
    repository: RepositoryPlan | None = None

    @property
    def builds(self) -> bool:
        """True when an engine has to be built."""
        return self.build is None or not self.build.reused

    @property
    def converts(self) -> bool:
        """True when a checkpoint has to be made: none is needed for an engine that exists."""
        return self.builds and not self.checkpoint_reused

    def stages(self) -> list[Stage]:
        """The four stages in order; a path is None where it follows from weights that are not here yet."""
        repository, build = self.repository, self.build
        place, engine = build.path if build else None, self.engine_bytes
        return [
            planned_stage("model", self.model_path, self.missing, done=self.model_reused),
            planned_stage(
                "convert",
                self.checkpoint_path,
                self.checkpoint_bytes,
                done=not self.converts,
                command=self._convert_command(),
            ),
            planned_stage("build", place, engine, done=not self.builds, command=self._build_command()),
            planned_stage(
                "repo", repository.path if repository else None, 0, done=bool(repository and repository.reused)
            ),
        ]

    def _convert_command(self) -> str | None:
        """NVIDIA's converter, where it is the one that converts."""
        if self.conversion is None or self.conversion.toolkit is None or self.checkpoint_path is None:
            return None
        model = Model(path=self.model_path, manifest=self.model.manifest())
        return str(upstream_command(model, self.conversion, self.checkpoint_path))

    def _build_command(self) -> str | None:
        """The program that would build the engine, where both folders are known."""
        if self.build is None or self.checkpoint_path is None:
            return None
        command = self.build.engine.command(self.checkpoint_path, self.build.path)
        return None if command is None else str(command)


def engine_destination(name: str) -> Path | None:
    """`$ENGINE_DEST_PATH/<name>`, where engines outlive the store; None when the variable is not set."""
    folder = os.environ.get(ENGINE_DEST_PATH)
    return (Path(folder).expanduser() / name).absolute() if folder else None


def plan_import(
    spec: ImportSpec, *, store: Store | None = None, token: str | None = None, progress: Progress = SILENT
) -> ImportPlan:
    """Everything that can be known before the weights are pulled, with the sizes of what is to be made.

    Raises what `plan_model` raises, and UsageError for sizes and limits that the model does not allow.
    """
    store = store or Store()
    # The repository is assembled last, but what would stop it is told first.
    asked = spec.repository
    resolve_settings(settings_of(asked), profile(asked.release), spelled=spelled_as(asked))
    _require_replaceable(spec)
    _require_tokenizer(spec)
    own = spec.tokenizer is None
    model = plan_model(
        spec.source,
        name=spec.name,
        store=store,
        token=token,
        own_tokenizer=own,
        any_architecture=spec.convert.converter == "upstream",
        progress=progress,
    )
    need = None if is_foreign(spec, model.config) else need_of(_wish(spec, model))
    if need is not None:
        require_fitting(need.engine.config_outline(), spec.repository, draft=spec.draft)
    path = model_destination(model, None, store)
    published = reusable(Model, path, model.fingerprint)
    plan = ImportPlan(
        model=model,
        model_path=path,
        model_reused=published is not None,
        missing=missing_bytes(model, store=store),
        checkpoint_bytes=_checkpoint_bytes(spec, model) if need else model.weight_bytes,
        engine_bytes=need.engine.disk_bytes if need else model.weight_bytes,
        # What trtllm-build takes is an estimate that nothing is refused for; so it is told, and not a part of the need.
        memory_bytes=max(need.total, need.engine.peak_memory) if need else None,
    )
    local = published or _model_in_place(model)
    return plan if local is None else _plan_further(spec, plan, local, store)


def _require_replaceable(spec: ImportSpec) -> None:
    """ArtifactError when something of the user's lies where engine or repository are to go.

    RepositoryError when names of the models are taken in the repository to which they are to be added.
    """
    if spec.engine_out is not None:
        reusable(Engine, spec.engine_out, "")
    if spec.out is not None:
        reusable(ModelRepository, spec.out, "")
    if spec.into is not None:
        runtime = choose_runtime(spec.build.runtime, container=spec.build.container).NAME
        models = engine_models(spec.repository, draft=spec.draft is not None)
        require_repository_room(spec.into, spec.repository, models, runtime=runtime)


def _require_tokenizer(spec: ImportSpec) -> None:
    """RepositoryError when the folder of another tokenizer holds none."""
    if spec.tokenizer is not None:
        tokenizer_files(spec.tokenizer)


def _wish(spec: ImportSpec, model: ModelPlan) -> Wish:
    return Wish(
        hf=model.config,
        convert=spec.convert,
        build=spec.build,
        kv_tokens=spec.repository.max_tokens_in_paged_kv_cache,
        tokenizers=spec.repository.preprocessing_instance_count + spec.repository.postprocessing_instance_count,
        bls=spec.repository.bls_instance_count or 1,
        tokenizer_bytes=next((file.size for file in model.files if file.name == "tokenizer.json"), 0),
        draft=draft_memory(read_engine(spec.draft.path), spec.repository.max_tokens_in_paged_kv_cache)
        if spec.draft
        else 0,
    )


def _checkpoint_bytes(spec: ImportSpec, model: ModelPlan) -> int:
    """The weights of the checkpoint stay in its dtype, whatever the engine packs them to."""
    config = checkpoint_config(model.config, spec.convert)
    return parameter_count(config) * numpy_dtype(CODES[config["dtype"]]).itemsize


def _model_in_place(model: ModelPlan) -> Model | None:
    """A model whose files are on this machine, seen as the artefact that it will become."""
    return None if model.folder is None else Model(path=model.folder, manifest=model.manifest())


def _plan_further(spec: ImportSpec, plan: ImportPlan, model: Model, store: Store) -> ImportPlan:
    conversion = plan_conversion(model, spec.convert)
    place = destination_of(conversion, spec.name, store=store)
    if plan.memory_bytes is None:
        return replace(plan, conversion=conversion, checkpoint_path=place.path, checkpoint_reused=place.reused)
    build = _plan_build(spec, conversion, store)
    repository = None
    if build.reused:
        engine = _engine(build)
        repository = _plan_repository(spec, model, engine, store)
    return replace(
        plan,
        checkpoint_bytes=conversion.total_bytes,
        conversion=conversion,
        checkpoint_path=place.path,
        checkpoint_reused=place.reused,
        build=build,
        repository=repository,
    )


def _plan_build(spec: ImportSpec, conversion: Conversion, store: Store) -> BuildPlan:
    """The build of a checkpoint that need not exist: its config and fingerprint decide the engine.

    So an engine is found again after `--discard-intermediate`.
    """
    manifest = Manifest(kind="checkpoint", name=spec.name, fingerprint=conversion.fingerprint)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(conversion.config), encoding="utf-8")
        stand_in = Checkpoint(path=Path(folder), manifest=manifest)
        return plan_build(stand_in, spec.build, name=spec.name, out=spec.engine_out, store=store)


def _engine(build: BuildPlan) -> Engine:
    return Engine(path=build.path, manifest=load_artifact(Engine, build.path).manifest)


def require_room(spec: ImportSpec, plan: ImportPlan, store: Store) -> None:
    """DiskSpaceError or MemoryLimitError when `plan` does not fit this machine."""
    if not plan.builds:
        return
    checkpoint = plan.checkpoint_bytes if plan.converts else 0
    what = f"The files of {spec.name} ({gibibytes(plan.missing)} to pull, {gibibytes(checkpoint)} checkpoint"
    quantized = spec.convert.quantize != "none" or bool(plan.model.config.get("quantization_config"))
    smaller = "" if quantized else "--quantize int8 or int4 makes the engine smaller, not the checkpoint."
    if spec.engine_out is None:
        require_disk(
            store.root,
            plan.missing + checkpoint + plan.engine_bytes,
            f"{what}, {gibibytes(plan.engine_bytes)} engine)",
            elsewhere="TRTSERVE_HOME",
            smaller=smaller,
        )
    else:
        require_disk(store.root, plan.missing + checkpoint, f"{what})", elsewhere="TRTSERVE_HOME")
        engine = f"The engine of {spec.name}"
        require_disk(spec.engine_out, plan.engine_bytes, engine, elsewhere=ENGINE_DEST_PATH, smaller=smaller)
    if plan.memory_bytes is not None:
        wish = _wish(spec, plan.model)
        require_wish(wish, spec.name)
        require_gpu_room(need_of(wish).engine, spec.build)


def import_to_repository(
    spec: ImportSpec,
    *,
    store: Store | None = None,
    token: str | None = None,
    record: bool = True,
    progress: Progress = SILENT,
) -> ModelRepository:
    """Take a model from its source to a model repository, and remember it under its name if `record`.

    Running it again reuses every step whose inputs and settings are the same. Raises what the stages raise;
    what was finished before the error is kept and reused.
    """
    store = store or Store()
    if for_llmapi(spec):
        return import_for_llmapi(spec, store=store, token=token, record=record, progress=progress)
    plan = plan_import(spec, store=store, token=token, progress=progress)
    require_room(spec, plan, store)
    model = pull_model(plan.model, store=store, token=token, progress=progress)
    conversion = plan_conversion(model, spec.convert)
    make_engine = _make_engine if plan.memory_bytes is not None else make_foreign_engine
    engine = make_engine(spec, model, conversion, store, progress)
    repository = _make_repository(spec, model, engine, store, progress)
    checkpoint = destination_of(conversion, spec.name, store=store).path
    if record:
        made = record_of(spec, plan.model, model, repository, checkpoint=checkpoint, engine=engine.path)
        take_name(made, store, progress)
    if spec.discard_intermediate:
        _discard(checkpoint, store, progress)
    return repository


def _make_engine(spec: ImportSpec, model: Model, conversion: Conversion, store: Store, progress: Progress) -> Engine:
    build = _plan_build(spec, conversion, store)
    if build.reused and spec.verify is None:
        place = destination_of(conversion, spec.name, store=store)
        progress.step(f"Checkpoint {place.path} is reused" if place.reused else "No checkpoint is needed any more")
        progress.step(f"Engine {build.path} is reused")
        return _engine(build)
    # A tokenizer that does not work is told before the long work, not after it.
    check_tokenizer(spec.tokenizer_of(model), conversion.config["vocab_size"])
    checkpoint = convert_model(model, spec.convert, name=spec.name, store=store, verify=spec.verify, progress=progress)
    return build_engine(checkpoint, spec.build, name=spec.name, out=spec.engine_out, store=store, progress=progress)


def _make_repository(
    spec: ImportSpec, model: Model, engine: Engine, store: Store, progress: Progress
) -> ModelRepository:
    plan = _plan_repository(spec, model, engine, store)
    if plan.reused:
        progress.step(f"Model repository {plan.path} is reused")
    return assemble_repository(
        engine,
        spec.tokenizer_of(model),
        spec.repository,
        draft=spec.draft,
        draft_tokenizer=spec.draft_tokenizer,
        out=spec.out,
        into=spec.into,
        store=store,
        progress=progress,
    )


def _plan_repository(spec: ImportSpec, model: Model, engine: Engine, store: Store) -> RepositoryPlan:
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


def _discard(checkpoint: Path, store: Store, progress: Progress) -> None:
    """Remove the checkpoint. Engine files are the repository's too, and a model would have to be pulled again."""
    if not checkpoint.is_dir():
        return
    size = inventory.freed_bytes([checkpoint])
    inventory.remove(inventory.Removal(names=(), folders=(checkpoint,), kept=(), size=size), store=store)
    progress.step(f"Checkpoint discarded: {gibibytes(size)} freed")

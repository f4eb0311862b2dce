"""Triton model repositories: planned from an engine (or a model for vLLM), a tokenizer, draft and adapters; written."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Artifact, Engine, Manifest, Model, ModelRepository, fingerprint
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import CorruptFileError, UsageError
from trtserve.executor.loaders import embedded_runtime, is_embedded, is_embedded_runtime
from trtserve.executor.runtimes import RUNTIMES
from trtserve.executor.vllm.installation import ANY, any_release, require_installation
from trtserve.executor.vllm.runtime import vllm_engine_config
from trtserve.files import read_json_object
from trtserve.progress import Progress
from trtserve.repository.adapters import NamedAdapter, resolve_adapters, write_adapters
from trtserve.repository.config import ConfigOptions
from trtserve.repository.draft import Draft, resolve_draft
from trtserve.repository.engines import (
    limits_of,
    link_engine,
    own_files,
    rank_sizes,
    read_engine,
    require_engine_files,
    write_hugging_face,
)
from trtserve.repository.llmapi import require_weights
from trtserve.repository.options import resolve_options
from trtserve.repository.pooling import PoolingRepositoryPlan, plan_pooling_repository, pools
from trtserve.repository.profiles import (
    BLS,
    CORE,
    DRAFT,
    MODELS,
    PREPROCESSING,
    Profile,
    classes_json,
    ignored_settings,
)
from trtserve.repository.programs import VERSION, model_names, placed, program_digest, root_of, write_model
from trtserve.repository.publishing import RepositoryPlan, exists
from trtserve.repository.settings import settable
from trtserve.repository.tokenizer import check_tokenizer, own_tokenizer_files, require_same_tokens
from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.store import Store, link_or_copy
from trtserve.store.sources import parse_source, served_name

SCHEMA = 4


@dataclass(frozen=True, kw_only=True)
class EngineRepositoryPlan(RepositoryPlan):
    """The repository of an engine: the five models and the alias, relocatable as a unit."""

    engine: Engine
    hugging_face: EngineConfig | None = None  # of a model that is served as it is, in place of an engine
    tokenizer: Path  # a Hugging Face folder
    profile: Profile
    options: ConfigOptions
    draft: Draft | None = None
    adapters: tuple[NamedAdapter, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        return engine_models(self.spec, draft=self.draft is not None)

    def write(self, folder: Path, progress: Progress) -> None:
        """Write the models; engine files are hard links unless `spec.copy`."""
        progress.step(f"Assembling model repository {self.spec.name}")
        if ignored := self.facts["ignored_parameters"]:
            progress.step(f"Ignored by the {self.facts['runtime']} runtime: {', '.join(ignored)}")
        if self.draft and self.draft.facts["ends_before_target"]:
            longest = self.draft.facts["limits"]["max_seq_len"]
            progress.warn(f"The draft engine ends at {longest} tokens; later tokens are generated without drafts.")
        embedded, names = is_embedded_runtime(self.facts["runtime"]), model_names(self.spec.suffix)
        for model in MODELS:
            write_model(folder / names[model], model, self.profile, self.options, embedded=embedded)
        write_model(folder / self.spec.name, BLS, self.profile, self.options, embedded=embedded)
        place = folder / names[CORE] / VERSION
        if self.hugging_face is None:
            link_engine(self.engine.path, place, copy=self.spec.copy)
        else:
            write_hugging_face(self.engine.path, self.hugging_face, place, copy=self.spec.copy)
        if self.draft is not None:
            write_model(folder / names[DRAFT], CORE, self.profile, self.draft.options, embedded=embedded)
            link_engine(self.draft.engine.path, folder / names[DRAFT] / VERSION, copy=self.spec.copy)
        write_adapters(self.adapters, folder, self.spec.suffix, peft=self.hugging_face is not None)
        own = folder / names[PREPROCESSING] / VERSION / "tokenizer"
        for file in own_tokenizer_files(self.tokenizer):
            link_or_copy(file, own / file.relative_to(self.tokenizer), copy=True)
        check_tokenizer(own, self.facts["vocab_size"], progress, keep=True)


def engine_models(spec: RepositorySpec, *, draft: bool) -> tuple[str, ...]:
    """Return the names of the models of an engine's repository, the alias last."""
    names = model_names(spec.suffix)
    return (*(names[model] for model in (*MODELS, *([DRAFT] if draft else []))), spec.name)


def default_name(engine: Artifact) -> str:
    """Return the alias when none is given: the engine's name, else that of its folder."""
    if engine.manifest is not None:
        return served_name(engine.manifest.name)
    return parse_source(f"local:{engine.path}").name


def plan_repository(
    engine: Engine,
    tokenizer: Path,
    spec: RepositorySpec,
    *,
    hugging_face: EngineConfig | None = None,
    draft: Engine | None = None,
    draft_tokenizer: Path | None = None,
    out: Path | None = None,
    into: Path | None = None,
    store: Store | None = None,
) -> EngineRepositoryPlan:
    """Plan the repository of `engine`: its configurations, manifest and destination.

    With `hugging_face`, a config for the vllm runtime, `engine` is the folder of a Hugging Face model.
    `tokenizer` is a Hugging Face folder, `draft` the engine of a second core model, and `draft_tokenizer` the folder of
    its tokenizer, if known. `into` is a repository to add the models to. Raises UsageError for a name, release or
    setting that cannot work, and for links to files elsewhere. Raises RepositoryError for a folder without an engine or
    tokenizer, for a draft engine or an adapter that does not fit the engine, and for names that are taken.
    """
    served_name(spec.name)
    config = hugging_face or _complete_engine(engine.path)
    tokens = own_tokenizer_files(tokenizer)
    for each in (engine, *([draft] if draft else [])):
        own_files(each.path)
    profile, options = resolve_options(spec, config, tokenizer=tokenizer)
    options, second = resolve_draft(spec, profile, options, config, draft)
    adapters = resolve_adapters(spec.lora, config)
    facts = repository_facts(spec, profile, options, config, engine)
    facts |= {"draft": None, "adapters": {each.name: each.task_id for each in adapters}}
    if second is not None:
        drafting = core_facts(DRAFT, spec, second.options, read_engine(second.engine.path), second.engine)
        facts["core_models"][model_names(spec.suffix)[DRAFT]] = drafting
        facts["draft"] = second.facts
    if draft_tokenizer is not None:
        require_same_tokens(tokenizer, draft_tokenizer)
    place = (out or into or (store or Store()).root) if spec.absolute_paths else None
    digest = fingerprint(
        stage="repo",
        schema=SCHEMA,
        spec=asdict(replace(spec, copy=False, lora={})),
        place=str(place),  # part of the content where paths are absolute
        engine=engine.fingerprint,
        **({} if hugging_face is None else {"hugging_face": hugging_face.content}),
        draft=second.engine.fingerprint if second else None,
        adapters=facts["adapters"],
        tokenizer=_digest(tokens),
        models=program_digest(MODELS),
        classes=[classes_json(model, profile.release) for model in MODELS],
    )
    manifest = Manifest(
        kind="repository",
        name=spec.name,
        fingerprint=digest,
        inputs={"engine": engine.fingerprint, **({"draft engine": draft.fingerprint} if draft else {})},
        spec={**asdict(spec), "lora": {name: str(folder) for name, folder in spec.lora.items()}},
        facts=facts,
    )
    path = (into or out or (store or Store()).destination(ModelRepository, spec.name, digest)).absolute()
    root = root_of(spec, path)
    models = engine_models(spec, draft=second is not None)
    return EngineRepositoryPlan(
        spec=spec,
        manifest=manifest,
        path=path,
        reused=exists(path, models, manifest, added=into is not None),
        added=into is not None,
        engine=engine,
        hugging_face=hugging_face,
        tokenizer=tokenizer,
        profile=profile,
        options=placed(options, spec.suffix, root),
        draft=None if second is None else replace(second, options=placed(second.options, spec.suffix, root)),
        adapters=adapters,
    )


def _complete_engine(folder: Path) -> EngineConfig:
    """Return the config of an engine whose files are all there; a model that is served as it is has none."""
    config = read_engine(folder)
    runtime = embedded_runtime(config)
    if runtime is not None and RUNTIMES[runtime].folder_as_engine:
        raise UsageError(
            f"{folder} holds no engine, but a Hugging Face model for the {runtime} runtime.",
            hint=f"Make the repository of the model again: trtserve repo MODEL --runtime {runtime}",
        )
    require_engine_files(folder, config)
    return config


def require_fitting(config: EngineConfig, spec: RepositorySpec, *, draft: Engine | None = None) -> None:
    """Check the settings against an engine that need not exist yet; `config` is the config.json that it will have.

    Raises UsageError for a release or setting that cannot work and RepositoryError for a draft engine or adapter that
    does not.
    """
    table, options = resolve_options(spec, config)
    resolve_draft(spec, table, options, config, draft)
    resolve_adapters(spec.lora, config)


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


_TOOLS = ("tensorrt_llm", "tensorrt", "cuda", "driver")


def repository_facts(
    spec: RepositorySpec, table: Profile, options: ConfigOptions, config: EngineConfig, engine: Engine
) -> dict[str, Any]:
    """Return the facts about `engine`, whose config.json is `config`, without draft model and adapters."""
    own, model = config.trtserve, config.model
    return {
        "alias": spec.name,
        "suffix": spec.suffix,
        "streaming": spec.streaming,
        "release": table.release,
        "all_releases": table.union,
        "ignored_parameters": _ignored_parameters(table, options, own.device) if is_embedded(config) else [],
        "runtime": own.runtime,
        "triton_backend": options.backend,
        "world_size": config.mapping.ranks,
        "container_paths": spec.container_paths,
        "core_models": {model_names(spec.suffix)[CORE]: core_facts(CORE, spec, options, config, engine)},
        "triton_max_batch_size": options.max_batch_size,
        "limits": limits_of(config),
        "dtype": model.dtype or None,
        "compute_precision": own.compute_precision or model.dtype or None,
        "kv_precision": own.kv_precision or None,
        "max_tokens_in_paged_kv_cache": options.parameters[CORE].get("max_tokens_in_paged_kv_cache"),
        "kv_cache_free_gpu_mem_fraction": options.parameters[CORE].get("kv_cache_free_gpu_mem_fraction"),
        "vocab_size": model.vocab_size or None,
        "mapping": model.content.get("mapping", {}),
        "machine": engine.manifest.facts.get("machine", {}) if engine.manifest is not None else {},
    }


def core_facts(
    model: str, spec: RepositorySpec, options: ConfigOptions, config: EngineConfig, engine: Engine
) -> dict[str, Any]:
    """Return one entry of `core_models`: engine folder in the repository, ranks, GPUs, and the engine's origin."""
    known = engine.manifest.facts if engine.manifest is not None else {}
    tools = engine.manifest.tools if engine.manifest is not None else {}
    found = {name: tools.get(name) for name in _TOOLS}
    found["tensorrt_llm"] = found["tensorrt_llm"] or config.version
    gpu = (engine.manifest.facts.get("gpu") if engine.manifest is not None else None) or {}
    found |= {"gpu": gpu.get("name"), "sm": gpu.get("sm")}
    return {
        "engine": f"{model_names(spec.suffix)[model]}/{VERSION}",
        "world_size": config.mapping.ranks,
        "gpu_device_ids": options.parameters[CORE].get("gpu_device_ids", ""),
        "origin": {name: str(value) for name, value in found.items() if value is not None},
        # What `trtserve build` takes to build it again: the checkpoint's folder, as its name may mean another one.
        "built_as": None if engine.manifest is None else str(known.get("checkpoint") or engine.name),
        "built_with": known.get("built_with"),
        "parameters": known.get("parameters"),
        "files": rank_sizes(engine.path),
    }


def _ignored_parameters(table: Profile, options: ConfigOptions, device: str) -> list[str]:
    """Return parameters that are set but ignored by the embedded executor; the core model's without a prefix."""
    if device == "cuda":
        core = {name: text for name, text in options.parameters[CORE].items() if name != "gpu_device_ids"}
        options = replace(options, parameters={**options.parameters, CORE: core})
    found = {model: ignored_settings(model, given, table.release) for model, given in options.parameters.items()}
    return [name if model == CORE else f"{model}.{name}" for model, names in found.items() for name in names]


_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def plan_vllm_repository(
    model: Model,
    spec: RepositorySpec,
    *,
    convert: ConvertSpec,
    build: BuildSpec,
    tokenizer: Path | None = None,
    out: Path | None = None,
    into: Path | None = None,
    store: Store | None = None,
) -> EngineRepositoryPlan | PoolingRepositoryPlan:
    """Plan the repository of a Hugging Face model for vLLM.

    Settings that are not parameters of the Triton models are arguments of vLLM's engine. Raises UsageError for those
    that the vLLM here does not have, UnsupportedModelError for an architecture that it does not know,
    MissingDependencyError without vLLM here unless `--vllm-python any`, and what `plan_repository` raises.
    """
    require_weights(model.path)
    hf, files = read_json_object(model.path / "config.json", CorruptFileError), own_files(model.path)
    weights = sum(path.stat().st_size for path in files if path.suffix in _WEIGHTS)
    config, pooled = _config(hf, weights, spec, [path.name for path in files], convert, build)
    if pooled:
        for flag, value in (("--tokenizer", tokenizer), ("--into", into)):
            if value is not None:
                raise UsageError(f"{flag} has no meaning for a pooling model: its repository has one model.")
        return plan_pooling_repository(model, spec, config, build, out=out, store=store)
    return plan_repository(
        Engine(path=model.path, manifest=model.manifest),
        tokenizer or model.path,
        replace(spec, settings=split_settings(spec.settings)[0]),
        hugging_face=config,
        out=out,
        into=into,
        store=store,
    )


def require_vllm_serves(
    hf: Mapping[str, Any],
    weights: int,
    spec: RepositorySpec,
    *,
    files: Collection[str] = (),
    convert: ConvertSpec,
    build: BuildSpec,
) -> EngineConfig:
    """Return the engine's config of a model with the config `hf` and `weights` bytes, before its `files` are here.

    Raises what `plan_vllm_repository` would raise.
    """
    config, pooled = _config(hf, weights, spec, files, convert, build)
    if pooled:
        return config
    resolve_options(replace(spec, settings=split_settings(spec.settings)[0]), config)
    resolve_adapters(spec.lora, config)
    return config


def _config(
    hf: Mapping[str, Any],
    weights: int,
    spec: RepositorySpec,
    files: Collection[str],
    convert: ConvertSpec,
    build: BuildSpec,
) -> tuple[EngineConfig, bool]:
    """Return the engine's config, and whether the model makes vectors or scores instead of text."""
    # For a container or another machine the tables of vLLM's releases answer.
    named = None if spec.vllm_python == ANY else spec.vllm_python
    installation = any_release() if spec.vllm_python == ANY else require_installation(named)
    settings, pooled = split_settings(spec.settings)[1], pools(hf, files, spec, installation)
    made = vllm_engine_config(hf, weights, convert, build, settings, installation, named=named, pools=pooled)
    return made, pooled


def split_settings(settings: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings of the Triton models, and those of vLLM's engine."""
    own = {key for key in settings if key.partition(".")[0] in (*MODELS, DRAFT) or settable(key) == key}
    return {key: settings[key] for key in settings if key in own}, {
        key: settings[key] for key in settings if key not in own
    }

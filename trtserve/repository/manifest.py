"""Facts in the manifest of a repository of engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtserve.artifacts import Engine
from trtserve.executor.loaders import is_embedded
from trtserve.repository.config import ConfigOptions
from trtserve.repository.core_models import world_size
from trtserve.repository.draft import Draft
from trtserve.repository.engine import limits_of, rank_sizes
from trtserve.repository.names import VERSION, model_names
from trtserve.repository.parameters import ignored_settings
from trtserve.repository.profiles import CORE, DRAFT, Profile
from trtserve.specs import RepositorySpec

_TOOLS = ("tensorrt_llm", "tensorrt", "cuda", "driver")


def repository_facts(
    spec: RepositorySpec, table: Profile, options: ConfigOptions, config: Mapping[str, Any], engine: Engine
) -> dict[str, Any]:
    """Return the facts about `engine`, whose config.json is `config`, without draft model and adapters."""
    own = config.get("trtserve", {})
    model = config.get("pretrained_config", {})
    return {
        "alias": spec.name,
        "suffix": spec.suffix,
        "streaming": spec.streaming,
        "release": table.release,
        "all_releases": table.union,
        "ignored_parameters": _ignored_parameters(table, options) if is_embedded(config) else [],
        "runtime": own.get("runtime", "tensorrt_llm"),
        "triton_backend": options.backend,
        "world_size": world_size(config),
        "container_paths": spec.container_paths,
        "core_models": {model_names(spec.suffix)[CORE]: core_facts(CORE, spec, options, config, engine)},
        "triton_max_batch_size": options.max_batch_size,
        "limits": limits_of(config),
        "dtype": model.get("dtype"),
        "compute_precision": own.get("compute_precision", model.get("dtype")),
        "kv_precision": own.get("kv_precision"),
        "max_tokens_in_paged_kv_cache": options.parameters[CORE].get("max_tokens_in_paged_kv_cache"),
        "kv_cache_free_gpu_mem_fraction": options.parameters[CORE].get("kv_cache_free_gpu_mem_fraction"),
        "vocab_size": model.get("vocab_size"),
        "mapping": model.get("mapping", {}),
        "machine": engine.manifest.facts.get("machine", {}) if engine.manifest is not None else {},
    }


def draft_facts(spec: RepositorySpec, draft: Draft, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry in `core_models` of a draft model, whose engine's config.json is `config`."""
    return {model_names(spec.suffix)[DRAFT]: core_facts(DRAFT, spec, draft.options, config, draft.engine)}


def core_facts(
    model: str, spec: RepositorySpec, options: ConfigOptions, config: Mapping[str, Any], engine: Engine
) -> dict[str, Any]:
    """Return one entry of `core_models`: engine folder in the repository, ranks, GPUs, and the engine's origin."""
    known = engine.manifest.facts if engine.manifest is not None else {}
    return {
        "engine": f"{model_names(spec.suffix)[model]}/{VERSION}",
        "world_size": world_size(config),
        "gpu_device_ids": options.parameters[CORE].get("gpu_device_ids", ""),
        "origin": engine_origin(engine, config),
        # What `trtserve build` takes to build it again: the checkpoint's folder, as its name may mean another one.
        "built_as": None if engine.manifest is None else str(known.get("checkpoint") or engine.name),
        "built_with": known.get("built_with"),
        "parameters": known.get("parameters"),
        "files": rank_sizes(engine.path),
    }


def engine_origin(engine: Engine, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions and the GPU that the engine was built with, as far as its manifest and config.json have them.

    The manifest of an engine that trtserve built has the versions in `tools`, and `name` and `sm` in the fact `gpu`.
    """
    tools = engine.manifest.tools if engine.manifest is not None else {}
    found = {name: tools.get(name) for name in _TOOLS}
    found["tensorrt_llm"] = found["tensorrt_llm"] or config.get("version")
    gpu = (engine.manifest.facts.get("gpu") if engine.manifest is not None else None) or {}
    found |= {"gpu": gpu.get("name"), "sm": gpu.get("sm")}
    return {name: str(value) for name, value in found.items() if value is not None}


def _ignored_parameters(table: Profile, options: ConfigOptions) -> list[str]:
    """Return parameters that are set but ignored by the embedded executor; the core model's without a prefix."""
    found = {model: ignored_settings(model, given, table.release) for model, given in options.parameters.items()}
    return [name if model == CORE else f"{model}.{name}" for model, names in found.items() for name in names]

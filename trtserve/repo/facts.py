"""What the manifest of a repository says about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtserve.artifacts import Engine
from trtserve.repo.draft import Draft
from trtserve.repo.engine import is_embedded, limits_of, rank_sizes
from trtserve.repo.placement import VERSION, model_names
from trtserve.specs import RepositorySpec
from trtserve.triton.config import ConfigOptions
from trtserve.triton.core_models import world_size
from trtserve.triton.parameters import set_without_meaning
from trtserve.triton.profiles import CORE, DRAFT, Profile

_TOOLS = ("tensorrt_llm", "tensorrt", "cuda", "driver")


def repository_facts(
    spec: RepositorySpec, table: Profile, options: ConfigOptions, config: Mapping[str, Any], engine: Engine
) -> dict[str, Any]:
    """Facts of the repository of `engine`, whose config.json is `config`, without its draft model and adapters."""
    own = config.get("trtserve", {})
    model = config.get("pretrained_config", {})
    return {
        "alias": spec.name,
        "suffix": spec.suffix,
        "streaming": spec.streaming,
        "release": table.release,
        "all_releases": table.union,
        "without_meaning": _without_meaning(table, options) if is_embedded(config) else [],
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
    """The entry of `core_models` of a draft model, whose engine's config.json is `config`."""
    return {model_names(spec.suffix)[DRAFT]: core_facts(DRAFT, spec, draft.options, config, draft.engine)}


def core_facts(
    model: str, spec: RepositorySpec, options: ConfigOptions, config: Mapping[str, Any], engine: Engine
) -> dict[str, Any]:
    """One entry of `core_models`: engine folder in the repository, ranks, GPUs, and where the engine comes from."""
    return {
        "engine": f"{model_names(spec.suffix)[model]}/{VERSION}",
        "world_size": world_size(config),
        "gpu_device_ids": options.parameters[CORE].get("gpu_device_ids", ""),
        "origin": engine_origin(engine, config),
        "built_as": _checkpoint_of(engine),
        "built_with": engine.manifest.facts.get("built_with") if engine.manifest is not None else None,
        "files": rank_sizes(engine.path),
    }


def _checkpoint_of(engine: Engine) -> str | None:
    """What `trtserve build` takes to build it again: the folder of the checkpoint, which its name may not find."""
    if engine.manifest is None:
        return None
    return str(engine.manifest.facts.get("checkpoint") or engine.name)


def engine_origin(engine: Engine, config: Mapping[str, Any]) -> dict[str, str]:
    """Versions and GPU that the engine was built with, as far as its manifest and config.json tell.

    Of an engine that trtserve built, `tools` of its manifest are the versions and the fact `gpu` has `name` and `sm`.
    """
    tools = engine.manifest.tools if engine.manifest is not None else {}
    found = {name: tools.get(name) for name in _TOOLS}
    found["tensorrt_llm"] = found["tensorrt_llm"] or config.get("version")
    gpu = (engine.manifest.facts.get("gpu") if engine.manifest is not None else None) or {}
    found |= {"gpu": gpu.get("name"), "sm": gpu.get("sm")}
    return {name: str(value) for name, value in found.items() if value is not None}


def _without_meaning(table: Profile, options: ConfigOptions) -> list[str]:
    """Parameters that are set and that the embedded executor ignores, those of the core model by their bare names."""
    found = {model: set_without_meaning(model, given, table.release) for model, given in options.parameters.items()}
    return [name if model == CORE else f"{model}.{name}" for model, names in found.items() for name in names]

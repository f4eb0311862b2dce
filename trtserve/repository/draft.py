"""The draft model: a second core model that proposes tokens, for speculative decoding through the BLS model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtserve.artifacts import Engine, Model
from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import RepositoryError, TrtserveError, UsageError
from trtserve.executor.loaders import is_embedded
from trtserve.progress import SILENT, Progress
from trtserve.repository.config import ConfigOptions
from trtserve.repository.engines import limits_of, read_engine, require_engine_files, require_startable
from trtserve.repository.options import core_instances, core_parameters, engine_types
from trtserve.repository.profiles import BLS, CORE, DRAFT, Profile
from trtserve.repository.programs import VERSION
from trtserve.repository.settings import resolve_settings, settings_of
from trtserve.specs import RepositorySpec
from trtserve.store import Store

_GPU_FRACTION = 0.9  # TensorRT-LLM's default share of free GPU memory, which two models must divide
_PREFIX = f"{DRAFT}."


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The draft model of a repository."""

    engine: Engine
    options: ConfigOptions  # of its configuration, under the core model's name
    facts: Mapping[str, Any]


def find_draft(text: str | None, store: Store, progress: Progress = SILENT) -> tuple[Engine | None, Path | None]:
    """Return the draft engine and, for an imported model, the folder of its tokenizer."""
    if text is None:
        return None, None
    engine = store.find(Engine, text, progress=progress)
    with suppress(TrtserveError):
        if not Path(text).is_dir():
            return engine, store.find(Model, text).path
    return engine, None


def resolve_draft(
    spec: RepositorySpec, table: Profile, options: ConfigOptions, config: EngineConfig, engine: Engine | None
) -> tuple[ConfigOptions, Draft | None]:
    """Return the repository's options as the draft model `engine` changes them, and the draft model.

    `config` is the target engine's `config.json`. Raises RepositoryError for an engine that cannot be the draft of this
    target (or a target that was not built for drafts) and UsageError for settings that cannot work.
    """
    own = {key.removeprefix(_PREFIX): value for key, value in spec.settings.items() if key.startswith(_PREFIX)}
    if engine is None:
        if own:
            raise UsageError(
                f"--set {_PREFIX}{next(iter(own))} needs a draft model.", hint="Give --draft-engine ENGINE."
            )
        return options, None
    draft = read_engine(engine.path)
    require_engine_files(engine.path, draft)
    require_pair(config, draft, engine.name)
    target, proposed = _cache_parameters(spec, config, draft)
    settings = resolve_settings(own, table)
    given = settings.parameters.get(CORE, {})
    parameters = {**core_parameters(spec, table, draft), **proposed, **given}
    if is_embedded(draft):
        require_startable(parameters, draft, release=table.release, settings=given)
    parameters["gpt_model_path"] = f"{DRAFT}/{VERSION}"
    types = {} if is_embedded(draft) else engine_types(table, draft)
    counts = {CORE: 1 if is_embedded(draft) else core_instances(parameters)}
    fields = {**types, **settings.variables}
    own_options = replace(options, parameters={CORE: parameters}, instance_counts=counts, **fields)
    set_by_user = {key.removeprefix(f"{CORE}.") for key in settings_of(spec)}
    defaults = {name: value for name, value in target.items() if name not in set_by_user}
    names = {"tensorrt_llm_model_name": CORE, "tensorrt_llm_draft_model_name": DRAFT}
    shared = {
        **options.parameters,
        CORE: {**options.parameters[CORE], **defaults},
        BLS: {**names, **options.parameters[BLS]},
    }
    second = Draft(engine=engine, options=own_options, facts=_facts(engine, draft, config))
    return replace(options, parameters=shared), second


def require_pair(target: EngineConfig, draft: EngineConfig, name: str) -> None:
    """Raise RepositoryError when the engine `name` with config `draft` cannot be the draft model of `target`."""
    if is_embedded(target) != is_embedded(draft):
        raise RepositoryError(
            "Target and draft engine were built for different runtimes.", hint="Build both for the same runtime."
        )
    sizes = [each.model.vocab_size for each in (target, draft)]
    if sizes[0] != sizes[1]:
        raise RepositoryError(
            f"The draft engine's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}; ids must mean the same.",
            hint="Take a smaller model of the same family as the draft.",
        )
    if target.build.max_draft_len < 1:
        raise RepositoryError(
            f"The target engine takes no draft tokens, so {name} cannot be its draft model.",
            hint="Build the target again with --max-draft-len, for example 8.",
        )


def _cache_parameters(
    spec: RepositorySpec, target: EngineConfig, draft: EngineConfig
) -> tuple[dict[str, str], dict[str, str]]:
    """Return default KV cache parameters of target and draft.

    Rounds share the start of their prompts, so blocks are reused. Both models load at once and see the same free GPU
    memory: their shares are such that both caches hold the same number of tokens. The embedded executor's default
    leaves room for two models.
    """
    fraction = spec.kv_cache_free_gpu_mem_fraction or (None if is_embedded(target) else _GPU_FRACTION)
    total = _token_size(target) + _token_size(draft)
    result: list[dict[str, str]] = []
    for config in (target, draft):
        reuse = config.build.plugin_config.use_paged_context_fmha
        result.append({"enable_kv_cache_reuse": "true"} if reuse else {})
        if fraction is not None:
            result[-1]["kv_cache_free_gpu_mem_fraction"] = f"{fraction * _token_size(config) / total:.4f}"
    return result[0], result[1]


def _token_size(config: EngineConfig) -> int:
    """Return how many numbers the KV cache holds for one token."""
    model = config.model
    return model.num_hidden_layers * model.num_key_value_heads * model.head_size or 1


def _facts(engine: Engine, draft: EngineConfig, target: EngineConfig) -> dict[str, Any]:
    own = draft.trtserve
    return {
        "model": DRAFT,
        "engine": engine.name,
        "limits": limits_of(draft),
        "max_draft_len": target.build.max_draft_len,
        "gives_logits": draft.build.gather_generation_logits,
        "ends_before_target": draft.build.max_seq_len < target.build.max_seq_len,
        "compute_precision": own.compute_precision or draft.model.dtype or None,
        "kv_precision": own.kv_precision or None,
    }

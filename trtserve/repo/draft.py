"""A second core model whose engine proposes tokens to the first: speculative decoding through the BLS model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtserve.artifacts import Engine
from trtserve.errors import RepositoryError, UsageError
from trtserve.repo.engine import is_embedded, limits_of, read_engine, require_engine_files
from trtserve.repo.options import core_instances, core_parameters, settings_of
from trtserve.repo.placement import VERSION
from trtserve.repo.release import engine_types
from trtserve.specs import RepositorySpec
from trtserve.triton.config import ConfigOptions
from trtserve.triton.embedded import require_startable
from trtserve.triton.profiles import BLS, CORE, DRAFT, Profile
from trtserve.triton.settings import resolve_settings

_GPU_FRACTION = 0.9  # what TensorRT-LLM takes when nobody says anything; two models take that from one GPU
_PREFIX = f"{DRAFT}."


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The draft model of a repository; `options` say what its configuration holds under the core model's name."""

    engine: Engine
    options: ConfigOptions
    facts: Mapping[str, Any]


def resolve_draft(
    spec: RepositorySpec, table: Profile, options: ConfigOptions, config: Mapping[str, Any], engine: Engine | None
) -> tuple[ConfigOptions, Draft | None]:
    """`options` of the repository with what a draft model changes in them, and the draft model.

    `config` is the target engine's `config.json`. RepositoryError for an engine that cannot be the draft of this target
    (or a target that was not built for drafts), UsageError for settings that cannot work.
    """
    own = {key.removeprefix(_PREFIX): value for key, value in spec.settings.items() if key.startswith(_PREFIX)}
    if engine is None:
        if own:
            raise UsageError(
                f"--set {_PREFIX}{next(iter(own))} needs a draft model.", hint="Give --draft-engine ENGINE."
            )
        return options, None
    draft = read_engine(engine.path)
    require_engine_files(engine.path, draft, embedded=is_embedded(draft))
    require_pair(config, draft, engine.name)
    target, proposed = _cache_defaults(spec, config, draft)
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
    return _with_draft(spec, options, target), Draft(
        engine=engine, options=own_options, facts=_facts(engine, draft, config)
    )


def _with_draft(spec: RepositorySpec, options: ConfigOptions, cache: Mapping[str, str]) -> ConfigOptions:
    given = {key.removeprefix(f"{CORE}.") for key in settings_of(spec)}
    names = {"tensorrt_llm_model_name": CORE, "tensorrt_llm_draft_model_name": DRAFT}
    core = options.parameters[CORE]
    defaults = {name: value for name, value in cache.items() if name not in given}
    parameters = {**options.parameters, CORE: {**core, **defaults}, BLS: {**names, **options.parameters[BLS]}}
    return replace(options, parameters=parameters)


def require_pair(target: Mapping[str, Any], draft: Mapping[str, Any], name: str) -> None:
    """RepositoryError when the engine `name`, whose config.json is `draft`, cannot be the draft model of `target`."""
    if is_embedded(target) != is_embedded(draft):
        raise RepositoryError(
            "Target and draft engine were built for different runtimes.", hint="Build both for the same runtime."
        )
    sizes = [each["pretrained_config"].get("vocab_size") for each in (target, draft)]
    if sizes[0] != sizes[1]:
        raise RepositoryError(
            f"The draft engine's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}; ids must mean the same.",
            hint="Take a smaller model of the same family as the draft.",
        )
    if int(target["build_config"].get("max_draft_len") or 0) < 1:
        raise RepositoryError(
            f"The target engine takes no draft tokens, so {name} cannot be its draft model.",
            hint="Build the target again with --max-draft-len, for example 8.",
        )


def _cache_defaults(
    spec: RepositorySpec, target: Mapping[str, Any], draft: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, str]]:
    """Parameters of the KV caches of both models: the prompt of a round is that of the round before, and more."""
    shares = _shares(spec, target, draft)
    result = []
    for config, share in zip((target, draft), shares, strict=True):
        plugins = config["build_config"].get("plugin_config", {})
        values = {"enable_kv_cache_reuse": "true"} if plugins.get("use_paged_context_fmha") else {}
        if share is not None:
            values["kv_cache_free_gpu_mem_fraction"] = f"{share:.4f}"
        result.append(values)
    return result[0], result[1]


def _shares(
    spec: RepositorySpec, target: Mapping[str, Any], draft: Mapping[str, Any]
) -> tuple[float | None, float | None]:
    """Shares of the free memory, such that both caches hold the same number of tokens; None where nothing is said.

    Both models load at once and see the same free memory. What the embedded executor takes when nobody says anything
    leaves room for two.
    """
    fraction = spec.kv_cache_free_gpu_mem_fraction or (None if is_embedded(target) else _GPU_FRACTION)
    if fraction is None:
        return None, None
    own, proposed = _token_size(target), _token_size(draft)
    return fraction * own / (own + proposed), fraction * proposed / (own + proposed)


def _token_size(config: Mapping[str, Any]) -> int:
    """Numbers that the KV cache holds for one token."""
    model = config["pretrained_config"]
    heads, hidden = int(model.get("num_attention_heads", 1)), int(model.get("hidden_size", 1))
    size = int(model.get("head_size") or hidden // heads)
    return int(model.get("num_hidden_layers", 1)) * int(model.get("num_key_value_heads") or heads) * size


def _facts(engine: Engine, draft: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    own, build = draft.get("trtserve", {}), draft["build_config"]
    shorter = int(build.get("max_seq_len") or 0) < int(target["build_config"].get("max_seq_len") or 0)
    return {
        "model": DRAFT,
        "engine": engine.name,
        "limits": limits_of(draft),
        "max_draft_len": target["build_config"].get("max_draft_len"),
        "gives_logits": bool(build.get("gather_generation_logits")),
        "ends_before_target": shorter,
        "compute_precision": own.get("compute_precision", draft["pretrained_config"].get("dtype")),
        "kv_precision": own.get("kv_precision"),
    }

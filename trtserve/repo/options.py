"""What the configurations of a repository's models say, from its specification and its engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.errors import UsageError, counted
from trtserve.repo.engine import is_embedded, limits_of
from trtserve.repo.placement import ENGINE, TOKENIZER
from trtserve.repo.release import engine_types, release_of_engine
from trtserve.specs import RepositorySpec
from trtserve.triton.config import ConfigOptions
from trtserve.triton.core_models import Groups, device_groups, world_size
from trtserve.triton.embedded import require_carried_out, require_startable
from trtserve.triton.parameters import find_parameter
from trtserve.triton.profiles import BLS, CORE, DRAFT, MODELS, POSTPROCESSING, PREPROCESSING, Profile, profile
from trtserve.triton.settings import Settings, resolve_settings

_MOST_BLS = 32

# Fields of RepositorySpec that are another way to say --set.
_NAMED = {
    "batching_strategy": "gpt_model_type",
    "batch_scheduler_policy": "batch_scheduler_policy",
    "enable_kv_cache_reuse": "enable_kv_cache_reuse",
    "enable_chunked_context": "enable_chunked_context",
    "max_attention_window_size": "max_attention_window_size",
    "exclude_input_in_output": "exclude_input_in_output",
    "accumulate_tokens": f"{BLS}.accumulate_tokens",
    "max_queue_size": "max_queue_size",
}


def settings_of(spec: RepositorySpec) -> dict[str, str]:
    """`--set` and the flags that mean the same, without the draft model's; UsageError for one given in both ways."""
    settings = {key: value for key, value in spec.settings.items() if not key.startswith(f"{DRAFT}.")}
    for field, key in _NAMED.items():
        value = getattr(spec, field)
        if value is None:
            continue
        given = next((each for each in (key, f"{CORE}.{key}", field) if each in settings), None)
        if given is not None:
            raise UsageError(f"--set {given} and the flag of {field} were both given; leave one of them out.")
        settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return settings


def spelled_as(spec: RepositorySpec) -> dict[str, str]:
    """Key of `settings_of` → the option that gave it, for those that have one."""
    return {key: f"--{field.replace('_', '-')}" for field, key in _NAMED.items() if getattr(spec, field) is not None}


def resolve_options(
    spec: RepositorySpec, config: Mapping[str, Any], *, tokenizer: Path | None = None
) -> tuple[Profile, ConfigOptions]:
    """What the models of a repository will say, for an engine whose `config.json` is `config`.

    `tokenizer` is its folder where that is known. UsageError for a release or setting that cannot work; the engine need
    not exist yet.
    """
    embedded = is_embedded(config)
    table = profile(_embedded_release(spec) if embedded else release_of_engine(spec, config))
    settings = resolve_settings(settings_of(spec), table, spelled=spelled_as(spec))
    options = _options(spec, table, settings, config, tokenizer)
    if embedded:
        require_carried_out({**settings.parameters, CORE: {}}, table.release)
        require_startable(
            options.parameters[CORE],
            config,
            release=table.release,
            settings=settings.parameters.get(CORE, {}),
            max_queue_size=options.max_queue_size,
        )
    return table, options


def _embedded_release(spec: RepositorySpec) -> str | None:
    if spec.triton_backend == "tensorrtllm":
        raise UsageError(
            "--triton-backend tensorrtllm serves engines of TensorRT-LLM; this one is for the openvino runtime.",
            hint="Leave it out: the embedded executor is driven by the python backend.",
        )
    return spec.release  # --trtllm-version may come from the environment of a whole machine, and means nothing here


def backend_of(spec: RepositorySpec, config: Mapping[str, Any]) -> str:
    """Triton backend of the core model of an engine: `python` for the embedded executor, else what `spec` says."""
    return "python" if is_embedded(config) else spec.triton_backend or "tensorrtllm"


def _options(
    spec: RepositorySpec, table: Profile, settings: Settings, config: Mapping[str, Any], tokenizer: Path | None
) -> ConfigOptions:
    embedded, limits = is_embedded(config), limits_of(config)
    core = core_parameters(spec, table, config)
    if embedded and tokenizer is not None and (tokenizer / "tokenizer.json").is_file() and _has_guides(table):
        core["guided_decoding_backend"] = "llguidance"
    defaults = {
        CORE: core,
        # The engine's vocabulary may be larger than the tokenizer's.
        PREPROCESSING: {"tokenizer_dir": TOKENIZER, "gpt_model_path": ENGINE},
        POSTPROCESSING: {"tokenizer_dir": TOKENIZER},
    }
    parameters = {model: {**defaults.get(model, {}), **settings.parameters.get(model, {})} for model in MODELS}
    excluded = parameters[CORE].get("exclude_input_in_output", "")
    if excluded.lower() in ("true", "1"):
        # The BLS model looks for stop words behind the prompt, and cannot see what the core model does by default.
        parameters[BLS]["exclude_input_in_output"] = excluded
    if not embedded:
        _require_gpus(parameters[CORE].get("gpu_device_ids", ""), config, backend_of(spec, config))
    backend, batch = backend_of(spec, config), spec.triton_max_batch_size or limits["max_batch_size"] or 1
    if backend == "tensorrtllm":
        # Answers of the C++ backend come as they are made; the python core model hands them out one by one.
        parameters[BLS]["core_answers"] = "pushed"
    return ConfigOptions(
        max_batch_size=batch,
        decoupled=spec.streaming,
        backend=backend,
        parameters=parameters,
        instance_counts={
            PREPROCESSING: spec.preprocessing_instance_count,
            POSTPROCESSING: spec.postprocessing_instance_count,
            BLS: spec.bls_instance_count or bls_instances(backend, limits["max_batch_size"], streaming=spec.streaming),
            CORE: 1 if embedded else core_instances(parameters[CORE]),
        },
        keep_unset=backend == "python",
        **{**({} if embedded else engine_types(table, config)), **settings.variables},
    )


def _require_gpus(text: str, config: Mapping[str, Any], backend: str) -> None:
    groups, ranks = device_groups(text), world_size(config)
    if backend == "python" and len(groups) > 1:
        raise UsageError(
            f"--set gpu_device_ids={text}: the python variant takes one group of GPUs, not {len(groups)}.",
            hint="Leave --triton-backend python out, or add a second model with --suffix and --into.",
        )
    require_one_gpu_each(text, groups, ranks)


def require_one_gpu_each(text: str, groups: Groups, ranks: int) -> None:
    """UsageError where a group of `--set gpu_device_ids=text` has more or fewer GPUs than an instance has ranks."""
    wrong = next((group for group in groups if len(group) != ranks), None)
    if wrong is not None:
        raise UsageError(
            f"--set gpu_device_ids={text}: the group {','.join(map(str, wrong))} has {counted(len(wrong), 'GPU')} for "
            f"{counted(ranks, 'rank')} (tensor × pipeline parallel)."
        )


def bls_instances(backend: str, max_batch_size: int | None, *, streaming: bool) -> int:
    """Processes of the BLS model: one serves many requests, but only one stream of the C++ backend.

    With fewer of them than the engine takes requests, its batch would never be full.
    """
    if backend != "tensorrtllm" or not streaming:
        return 1
    return max(1, min(max_batch_size or 1, _MOST_BLS))


def core_instances(parameters: Mapping[str, str]) -> int:
    """Instances of a core model: as many as it has groups of GPUs."""
    return max(1, len(device_groups(parameters.get("gpu_device_ids", ""))))


def _has_guides(table: Profile) -> bool:
    return find_parameter(CORE, "guided_decoding_backend", table.release) is not None


def core_parameters(spec: RepositorySpec, table: Profile, config: Mapping[str, Any]) -> dict[str, str]:
    """Parameters of a core model that nobody set, for the engine whose `config.json` is `config`."""
    values: dict[str, Any] = {
        "gpt_model_type": "inflight_fused_batching",
        "gpt_model_path": ENGINE,
        "max_beam_width": limits_of(config)["max_beam_width"] or 1,
        "max_tokens_in_paged_kv_cache": spec.max_tokens_in_paged_kv_cache,
        "kv_cache_free_gpu_mem_fraction": spec.kv_cache_free_gpu_mem_fraction,
    }
    if not is_embedded(config):
        values["batch_scheduler_policy"] = "guaranteed_no_evict"
    if any(parameter.name == "tokenizer_dir" for parameter in table.models[CORE].parameters):
        values["tokenizer_dir"] = TOKENIZER
    if is_embedded(config):
        values |= {
            "executor": "openvino",
            "executor_release": table.release,
            # Long prompts are cut into pieces between the steps of running requests; nothing has to be built for it.
            "enable_chunked_context": "true",
            # A client that went away is noticed within this time; a check costs about 0.1 ms per running request.
            "cancellation_check_period_ms": 50,
        }
    return {key: str(value) for key, value in values.items() if value is not None}

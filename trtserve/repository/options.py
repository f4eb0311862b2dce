"""The configurations of a repository's models: release, parameters and tensor types, from the spec and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import RepositoryError, UsageError, counted
from trtserve.executor.loaders import embedded_runtime, is_embedded
from trtserve.nvidia.releases import NEWEST, RELEASES, normalize_release, order
from trtserve.nvidia.releases import release_of as release_of_version
from trtserve.nvidia.releases.installed import require_engine_path
from trtserve.repository.config import ConfigOptions
from trtserve.repository.engines import limits_of, require_accepted, require_startable
from trtserve.repository.profiles import (
    BLS,
    CORE,
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
    Profile,
    added_parameters,
    find_parameter,
    profile,
)
from trtserve.repository.programs import ENGINE, TOKENIZER
from trtserve.repository.served import Groups, device_groups
from trtserve.repository.settings import Settings, resolve_settings, settings_of, spelled_as
from trtserve.specs import RepositorySpec

_MOST_BLS = 32
_TYPES = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}


def resolve_options(
    spec: RepositorySpec, config: EngineConfig, *, tokenizer: Path | None = None
) -> tuple[Profile, ConfigOptions]:
    """Return the configuration of a repository's models for an engine whose `config.json` is `config`.

    The engine need not exist yet; `tokenizer` is its folder, if known. Raises UsageError for a release or setting that
    cannot work.
    """
    runtime = embedded_runtime(config)
    embedded = runtime is not None
    if embedded and spec.triton_backend == "tensorrtllm":
        raise UsageError(
            f"--triton-backend tensorrtllm serves engines of TensorRT-LLM; this engine is for the {runtime} runtime.",
            hint="Leave it out: the embedded executor needs the python backend.",
        )
    # --trtllm-version may come from the machine's environment, and means nothing to the embedded executor.
    table = profile(spec.release if embedded else release_of_engine(spec, config))
    settings = resolve_settings(settings_of(spec), table, spelled=spelled_as(spec))
    options = _options(spec, table, settings, config, tokenizer)
    if embedded:
        require_accepted({**settings.parameters, CORE: {}}, table.release)
        require_startable(
            options.parameters[CORE],
            config,
            release=table.release,
            settings=settings.parameters.get(CORE, {}),
            max_queue_size=options.max_queue_size,
        )
    return table, options


def backend_of(spec: RepositorySpec, config: EngineConfig) -> str:
    """Return the core model's Triton backend: `python` for the embedded executor, else what `spec` asks for."""
    return "python" if is_embedded(config) else spec.triton_backend or "tensorrtllm"


def _options(
    spec: RepositorySpec, table: Profile, settings: Settings, config: EngineConfig, tokenizer: Path | None
) -> ConfigOptions:
    embedded, limits = is_embedded(config), limits_of(config)
    core = core_parameters(spec, table, config)
    guides = find_parameter(CORE, "guided_decoding_backend", table.release) is not None
    if embedded and guides and tokenizer is not None and (tokenizer / "tokenizer.json").is_file():
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
        # The BLS model searches stop words after the prompt, and cannot see the core model's default.
        parameters[BLS]["exclude_input_in_output"] = excluded
    if backend_of(spec, config) == "tensorrtllm":
        given = settings.parameters.get(CORE, {})
        name = next((row.name for row in added_parameters(CORE) if row.name in given), None)
        if name is not None:
            raise UsageError(
                f"--set {name}={given[name]}: NVIDIA's C++ backend does not read this parameter.",
                hint="Give --triton-backend python with it, or leave it out.",
            )
    if not embedded:
        if "ngram_max_draft_len" in settings.parameters.get(CORE, {}):
            raise UsageError(
                "ngram_max_draft_len: TensorRT-LLM's executor makes no draft tokens of a request's text.",
                hint="Leave it out, or build for CPUs with --runtime openvino.",
            )
        _require_gpus(parameters[CORE].get("gpu_device_ids", ""), config, backend_of(spec, config))
    backend, batch = backend_of(spec, config), spec.triton_max_batch_size or limits["max_batch_size"] or 1
    if backend == "tensorrtllm":
        # The C++ backend sends answers as they come; the python core model waits until each is fetched.
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


def _require_gpus(text: str, config: EngineConfig, backend: str) -> None:
    groups, ranks = device_groups(text), config.mapping.ranks
    if backend == "python" and len(groups) > 1:
        raise UsageError(
            f"--set gpu_device_ids={text}: the python backend takes one group of GPUs, not {len(groups)}.",
            hint="Leave --triton-backend python out, or add a second model with --suffix and --into.",
        )
    require_one_gpu_each(text, groups, ranks)


def require_one_gpu_each(text: str, groups: Groups, ranks: int) -> None:
    """Raise UsageError when a group of `--set gpu_device_ids=text` has not one GPU for each rank."""
    wrong = next((group for group in groups if len(group) != ranks), None)
    if wrong is not None:
        raise UsageError(
            f"--set gpu_device_ids={text}: the group {','.join(map(str, wrong))} has {counted(len(wrong), 'GPU')} for "
            f"{counted(ranks, 'rank')} (tensor × pipeline parallel)."
        )


def bls_instances(backend: str, max_batch_size: int | None, *, streaming: bool) -> int:
    """Return the number of processes of the BLS model.

    One process serves many requests, but only one stream of the C++ backend: fewer processes than the engine's batch
    would never fill that batch.
    """
    if backend != "tensorrtllm" or not streaming:
        return 1
    return max(1, min(max_batch_size or 1, _MOST_BLS))


def core_instances(parameters: Mapping[str, str]) -> int:
    """Return the number of instances of a core model: one per group of GPUs."""
    return max(1, len(device_groups(parameters.get("gpu_device_ids", ""))))


def core_parameters(spec: RepositorySpec, table: Profile, config: EngineConfig) -> dict[str, str]:
    """Return the default parameters of a core model for the engine whose `config.json` is `config`."""
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
    if (runtime := embedded_runtime(config)) is not None:
        values |= {
            "executor": runtime,
            "executor_release": table.release,
            # Long prompts are split between the steps of running requests; the engine needs no build option for it.
            "enable_chunked_context": "true",
            # A lost client is noticed within this time; a check costs about 0.1 ms per running request.
            "cancellation_check_period_ms": 50,
        }
    return {key: str(value) for key, value in values.items() if value is not None}


def release_of_engine(spec: RepositorySpec, config: EngineConfig) -> str:
    """Return `--release`, else the release of `--trtllm-version`, else that of the engine, else the newest.

    Raises UsageError for an unknown release and for two that contradict each other. Raises RepositoryError for an
    engine of an unknown release.
    """
    asked = None if spec.release is None else normalize_release(spec.release)
    installed = None
    if spec.trtllm_version is not None:
        require_engine_path(spec.trtllm_version)
        installed = normalize_release(release_of_version(spec.trtllm_version), option="--trtllm-version")
    if asked is not None and installed is not None and asked != installed:
        raise UsageError(
            f"--release {spec.release} and --trtllm-version {spec.trtllm_version} are different releases.",
            hint="Give one of them: --release chooses the tensors, --trtllm-version is what the server has installed.",
        )
    return asked or installed or _built_by(config) or NEWEST


def _built_by(config: EngineConfig) -> str | None:
    version = config.version
    if version is None:
        return None
    try:
        release = release_of_version(version)
    except UsageError:
        release = ""
    if release not in RELEASES:
        raise RepositoryError(
            f"The engine was built by TensorRT-LLM {version}; supported are {RELEASES[0]} … {NEWEST}.",
            hint=f"Build it with a supported release, or choose the tensors of one: --release {NEWEST}",
        )
    return release


def engine_types(table: Profile, config: EngineConfig) -> dict[str, str]:
    """Return ConfigOptions fields for the types of logits and prompt tables, which follow from the engine."""
    types = {}
    if order(table.release) >= order("0.17"):
        # The C++ backend supports these two types, and refuses logits of another type than the engine's.
        types["logits_datatype"] = "FP16" if config.model.logits_dtype == "float16" else "FP32"
    if order(table.release) >= order("0.20"):
        types["prompt_embedding_table_data_type"] = _TYPES.get(config.model.dtype, "FP16")
    return types

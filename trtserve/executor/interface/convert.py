"""Turn the interface's parameters into the engine's own data, and refuse those that the engine does not support."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from operator import attrgetter
from typing import Any

from trtserve.executor.engine.blocks import Retention, RetentionRules
from trtserve.executor.engine.limits import (
    AdapterOptions,
    ContextChunkingPolicy,
    EngineOptions,
    GuideTokenizer,
    KvCacheOptions,
)
from trtserve.executor.engine.requests import (
    AdapterSource,
    DraftSource,
    GenerationRequest,
    GuideSource,
    PostProcessor,
    PromptTable,
)
from trtserve.executor.engine.sampling import SamplingParameters
from trtserve.executor.interface.configs import (
    BatchingType,
    CommunicationMode,
    ExecutorConfig,
    PeftCacheConfig,
    RequestType,
)
from trtserve.executor.interface.requests import KvCacheRetentionConfig, Request, SamplingConfig

MAX_TOP_K = 1024

logger = logging.getLogger(__name__)


def engine_options(config: ExecutorConfig) -> EngineOptions:
    caching, scheduling = config.kv_cache_config, config.scheduler_config
    guided, parallel = config.guided_decoding_config, config.parallel_config
    devices = None if parallel is None else parallel.device_ids
    return EngineOptions(
        max_beam_width=config.max_beam_width,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        chunked_context=config.enable_chunked_context,
        policy=scheduling.capacity_scheduler_policy,
        chunking=scheduling.context_chunking_policy or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
        static_batching=config.batching_type is BatchingType.STATIC,
        max_queue_size=config.max_queue_size,
        normalize_log_probs=config.normalize_log_probs,
        generation_logits=config.gather_generation_logits,
        kv_cache=KvCacheOptions(
            max_tokens=caching.max_tokens,
            free_fraction=caching.free_gpu_memory_fraction,
            max_bytes=caching.max_gpu_total_bytes,
            windows=tuple(caching.max_attention_window or ()),
            reuse=caching.enable_block_reuse,
            partial_reuse=caching.enable_partial_reuse,
            copy_on_partial_reuse=caching.copy_on_partial_reuse,
        ),
        adapters=_adapter_options(config.peft_cache_config or PeftCacheConfig()),
        guides=None
        if guided is None
        else GuideTokenizer(
            text=guided.tokenizer_str,
            vocabulary=None if guided.tokenizer_str else guided.encoded_vocab,
            ends=guided.stop_token_ids or None,
        ),
        batched_post_processor=post_processors(config).get(Request.BATCHED_POST_PROCESSOR_NAME),
        ngram_max_draft_len=config.ngram_max_draft_len,
        refuse_long_sequences=config.fail_fast_on_attention_window_too_large,
        iteration_records=config.iter_stats_max_iterations,
        request_records=config.request_stats_max_iterations,
        device_ids=None if devices is None else tuple(devices),
    )


def _adapter_options(config: PeftCacheConfig) -> AdapterOptions:
    return AdapterOptions(
        host_module_layers=config.num_host_module_layer,
        device_module_layers=config.num_device_module_layer,
        optimal_rank=config.optimal_adapter_size,
        max_rank=config.max_adapter_size,
        device_fraction=config.device_cache_percent,
        host_bytes=config.host_cache_size,
        prefetch_dir=config.lora_prefetch_dir,
    )


def post_processors(config: ExecutorConfig) -> dict[str, PostProcessor]:
    """Return the logits post-processors that requests can name; those of 0.12's settings take no client id."""
    own = config.logits_post_processor_config
    named = dict((own.processor_map if own else config.logits_post_processor_map) or {})
    batched = own.processor_batched if own else config.logits_post_processor_batched
    named.pop(Request.BATCHED_POST_PROCESSOR_NAME, None)
    if batched is not None:
        named[Request.BATCHED_POST_PROCESSOR_NAME] = batched
    return named if own else {name: _without_client(each) for name, each in named.items()}


def _without_client(processor: PostProcessor) -> PostProcessor:
    return lambda *arguments: processor(*arguments[:-1])


def sampling_parameters(config: SamplingConfig) -> SamplingParameters:
    """Resolve the defaults of unset values and combinations of values."""
    names = [each.name for each in fields(SamplingParameters) if each.name != "greedy"]
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    top_k, temperature = min(given.pop("top_k", 0), MAX_TOP_K), given.pop("temperature", 1.0)
    greedy = temperature == 0 or top_k == 1 or (top_k == 0 and "top_p" not in given)
    if top_k:  # TensorRT-LLM's top-k sampler has no decay
        given.pop("top_p_decay", None)
    given.setdefault("num_return_sequences", config.beam_width)
    return SamplingParameters(greedy=greedy, temperature=temperature or 1.0, top_k=top_k, **given)


def engine_request(request: Request, named: Mapping[str, PostProcessor]) -> GenerationRequest:
    """Return the engine's request. Raises RuntimeError for a logits post-processor that is not among the `named`.

    What else is wrong with a request becomes its error response.
    """
    sampling, wanted, guided = request.sampling_config, request.output_config, request.guided_decoding_params
    draft, table, lora = request.external_draft_tokens_config, request.prompt_tuning_config, request.lora_config
    post_processor = request.logits_post_processor
    if name := request.logits_post_processor_name:
        post_processor = named.get(name)
        if post_processor is None:
            raise RuntimeError(f"The logits post-processor {name!r} is unknown to this executor")
    count = 1
    if sampling.beam_width == 1:
        count = max(request.num_return_sequences, sampling.num_return_sequences or 1)
    limit = request.allotted_time_ms
    return GenerationRequest(
        tokens=request.input_token_ids,
        max_tokens=request.max_tokens,
        sampling=sampling_parameters(sampling),
        num_sequences=count,
        problem=_problem(request),
        streaming=request.streaming,
        end_id=request.end_id,
        stop_words=request.stop_words or (),
        bad_words=request.bad_words or (),
        bias=request.embedding_bias,
        position_ids=request.position_ids,
        prompt_table=None if table is None else PromptTable(table.embedding_table, table.input_token_extra_ids),
        draft=None if draft is None else DraftSource(draft.tokens, draft.logits, draft.acceptance_threshold),
        adapter=None if lora is None else AdapterSource(lora.task_id, lora.weights, lora.config),
        guide=None if guided is None else GuideSource(guided.guide_type, guided.guide or ""),
        post_processor=post_processor,
        retention=_retention(request.kv_cache_retention_config),
        cache_salt=request.cache_salt_id,
        priority=request.priority,
        time_limit=None if limit is None else limit.total_seconds(),
        client_id=request.client_id,
        return_log_probs=wanted.return_log_probs,
        top_log_probs=request.top_log_probs,
        prompt_log_probs=request.prompt_log_probs,
        images=request.images,
        return_context_logits=wanted.return_context_logits,
        return_generation_logits=wanted.return_generation_logits,
        return_metrics=wanted.return_perf_metrics,
        return_all_tokens=request.return_all_generated_tokens,
        exclude_input=wanted.exclude_input_from_output,
    )


def _problem(request: Request) -> str | None:
    """Return what the interface itself finds wrong with a request."""
    width, count = request.sampling_config.beam_width, request.num_return_sequences
    if width > 1 and count > 1:
        return (
            f"num_return_sequences ({count}) of a request cannot be used with beam width {width}, which returns that "
            "many sequences itself"
        )
    draft = request.external_draft_tokens_config
    if draft is not None and draft.fast_logits:
        return "fast_logits are not supported by the embedded executor; send the draft logits"
    unsupported = next((feature for feature in REQUEST_FEATURES if feature.is_requested(request)), None)
    return None if unsupported is None else unsupported.message()


def _retention(config: KvCacheRetentionConfig | None) -> RetentionRules | None:
    if config is None:
        return None
    return RetentionRules(
        tuple(
            (each.token_start, each.token_end, Retention(each.priority, _seconds(each.duration_ms)))
            for each in config.token_range_retention_configs
        ),
        Retention(config.decode_retention_priority, _seconds(config.decode_duration_ms)),
    )


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _is_none(value: Any) -> bool:
    return value is None


def _is_empty(value: Any) -> bool:
    """True for None, an empty tensor or list, or a list of empty lists."""
    if value is None:
        return True
    if hasattr(value, "size"):
        return bool(value.size == 0)
    return all(hasattr(element, "__len__") and len(element) == 0 for element in value)


@dataclass(frozen=True)
class UnsupportedFeature:
    """A parameter that is accepted but not supported."""

    path: str  # attribute path from the request or the configuration
    neutral: Callable[[Any], bool]  # returns True for values that request nothing
    tensor: str = ""  # its Triton input or parameter

    def is_requested(self, record: Any) -> bool:
        """True when `record` has a value that is not neutral."""
        return not self.neutral(attrgetter(self.path)(record))

    @property
    def name(self) -> str:
        """Its name in the classes, with that of its tensor or parameter."""
        return self.path.rsplit(".", 1)[-1] + (f" (Triton: {self.tensor})" if self.tensor else "")

    def message(self) -> str:
        """Return the error for a request that uses it."""
        return f"{self.name} is not supported by the embedded executor; omit it or give its neutral value"


REQUEST_FEATURES = (
    UnsupportedFeature("sampling_config.beam_width_array", _is_empty),
    UnsupportedFeature("output_config.return_encoder_output", _one_of(False)),
    UnsupportedFeature("output_config.additional_model_outputs", _is_empty),
    UnsupportedFeature("multimodal_input", _is_none),
    UnsupportedFeature("multimodal_embedding", _is_none),
    UnsupportedFeature("mrope_config", _is_none, "mrope_rotary_cos_sin"),
    UnsupportedFeature("lookahead_config", _is_none, "lookahead_window_size"),
    UnsupportedFeature("encoder_input_token_ids", _is_empty),
    UnsupportedFeature("encoder_input_features", _is_empty),
    UnsupportedFeature("type", _one_of(RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION)),
    UnsupportedFeature("context_phase_params", _is_none),
    UnsupportedFeature("cross_attention_mask", _is_empty),
    UnsupportedFeature("eagle_config", _is_none),
    UnsupportedFeature("skip_cross_attn_blocks", _is_empty),
    UnsupportedFeature("language_adapter_uid", _is_none),
)

CONFIG_FEATURES = (
    UnsupportedFeature("kv_cache_config.sink_token_length", _one_of(None, 0)),
    UnsupportedFeature("additional_model_outputs", _is_empty),
    UnsupportedFeature("use_variable_beam_width_search", _one_of(False)),
)
"""Generation logits, guided decoding and adapters are not listed: their settings only permit them to requests."""

_CAPTURED = "decode steps are always captured on GPUs, and never on CPUs"
_KNOBS = "extended_runtime_perf_knob_config"
IGNORED_SETTINGS = {
    UnsupportedFeature("kv_cache_config.host_cache_size", _one_of(None, 0), "kv_cache_host_memory_bytes"): (
        "no block of the KV cache is moved between GPU and host"
    ),
    UnsupportedFeature("gpu_weights_percent", _one_of(1.0)): "all weights are where the model runs",
    UnsupportedFeature(f"{_KNOBS}.cuda_graph_mode", _one_of(False)): _CAPTURED,
    UnsupportedFeature(f"{_KNOBS}.cuda_graph_cache_size", _one_of(0)): _CAPTURED,
}
"""Settings of TensorRT-LLM that do nothing here → why."""

DECODING_FEATURES = (
    UnsupportedFeature("medusa_choices", _is_empty),
    UnsupportedFeature("lookahead_decoding_config", _is_none, "lookahead_window_size"),
    UnsupportedFeature("eagle_config", _is_none, "eagle_choices"),
)
"""Fields of `decoding_config`."""


def warn_about_ignored(config: ExecutorConfig, device: str) -> None:
    """Warn of each setting of `config` that has a value and no effect for an engine on this device."""
    for feature, why in IGNORED_SETTINGS.items():
        if feature.is_requested(config):
            logger.warning("%s has no effect in the embedded executor: %s.", feature.name, why)
    if device == "cpu" and config.parallel_config is not None and config.parallel_config.device_ids:
        logger.warning("device_ids (Triton: gpu_device_ids) has no effect: the engine runs on CPUs.")


def refuse_unsupported_config(config: ExecutorConfig) -> None:
    """Raise RuntimeError that names the first unsupported setting of `config` that would change results."""
    _refuse(CONFIG_FEATURES, config)
    if config.ngram_max_draft_len < 0:
        raise RuntimeError(f"ngram_max_draft_len is {config.ngram_max_draft_len}; expected 0 or more")
    if config.parallel_config and config.parallel_config.communication_mode is CommunicationMode.ORCHESTRATOR:
        raise RuntimeError("communication_mode ORCHESTRATOR is not supported by the embedded executor; use LEADER")
    if config.decoding_config is not None:
        _refuse(DECODING_FEATURES, config.decoding_config)
    mode = config.decoding_config and config.decoding_config.decoding_mode
    if mode and not (mode.isAuto() or mode.isTopKorTopP() or mode.isBeamSearch()):
        raise RuntimeError(f"decoding_mode {mode.name} is not supported by the embedded executor; use auto")


def warn_about_decoding_mode(config: ExecutorConfig) -> None:
    """Log a warning if the decoding mode of `config` does not select the decoder.

    TensorRT-LLM ignores beam search with one beam. A request that does not match an explicit mode has no sampler
    there, and its tokens are undefined; here the request decides.
    """
    mode = config.decoding_config and config.decoding_config.decoding_mode
    if not mode or mode.isAuto() or mode.isTopKandTopP():
        return
    if mode.isBeamSearch():
        if config.max_beam_width == 1:
            logger.warning("decoding_mode beam_search does not fit max_beam_width 1; using top_k_top_p")
        return
    name = "top_k" if mode.isTopK() else "top_p"
    logger.warning("decoding_mode %s is ignored: each request is sampled by its own top_k and top_p", name)
    if config.max_beam_width > 1:
        logger.warning(
            "decoding_mode %s does not fit max_beam_width %d: requests with beams use beam search",
            name,
            config.max_beam_width,
        )


def _refuse(features: Iterable[UnsupportedFeature], record: Any) -> None:
    for feature in features:
        if feature.is_requested(record):
            raise RuntimeError(feature.message())

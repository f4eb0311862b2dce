"""Turn the interface's parameters into the engine's own data, and the engine's outputs and records into its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime, timedelta

from trtserve.executor.engine.blocks import Retention, RetentionRules
from trtserve.executor.engine.limits import (
    AdapterOptions,
    ContextChunkingPolicy,
    EngineLimits,
    EngineOptions,
    GuideTokenizer,
    KvCacheOptions,
)
from trtserve.executor.engine.recorder import IterationRecord, RequestsRecord, SequenceRecord
from trtserve.executor.engine.requests import (
    AdapterSource,
    DraftSource,
    GenerationRequest,
    GuideSource,
    PostProcessor,
    PromptTable,
    RequestMetrics,
    RequestOutput,
)
from trtserve.executor.engine.sampling import SamplingParameters
from trtserve.executor.interface.configs import BatchingType, ExecutorConfig, PeftCacheConfig
from trtserve.executor.interface.requests import KvCacheRetentionConfig, Request, SamplingConfig
from trtserve.executor.interface.results import (
    InflightBatchingStats,
    IterationStats,
    KvCacheMetrics,
    KvCacheStats,
    RequestPerfMetrics,
    RequestStats,
    RequestStatsPerIteration,
    Response,
    Result,
    SpecDecodingStats,
    SpeculativeDecodingMetrics,
    StaticBatchingStats,
    TimingMetrics,
)
from trtserve.executor.interface.unsupported import refuse_unsupported

MAX_TOP_K = 1024


def engine_options(config: ExecutorConfig) -> EngineOptions:
    """Return the engine's settings."""
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
    """Return the logits post-processors that requests can name; release 0.12 calls them without the client's id."""
    own = config.logits_post_processor_config
    named = dict((own.processor_map if own else config.logits_post_processor_map) or {})
    batched = own.processor_batched if own else config.logits_post_processor_batched
    named.pop(Request.BATCHED_POST_PROCESSOR_NAME, None)
    if batched is not None:
        named[Request.BATCHED_POST_PROCESSOR_NAME] = batched
    return {name: _without_client(each) for name, each in named.items()} if config.release == "0.12" else named


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
        return_context_logits=wanted.return_context_logits,
        return_generation_logits=wanted.return_generation_logits,
        return_metrics=wanted.return_perf_metrics,
        return_all_tokens=request.return_all_generated_tokens,
        exclude_input=wanted.exclude_input_from_output,
    )


def _problem(request: Request) -> str | None:
    """Return what the interface itself finds wrong with a request; some releases do not check all values earlier."""
    problems = request.sampling_config.problems()
    if problems:
        return "; ".join(problems)
    width, counts = request.sampling_config.beam_width, [request.num_return_sequences]
    # Beams already are several sequences; since 0.16 the sampling config's number limits how many are returned.
    if request.release in ("0.14", "0.15"):
        counts.append(request.sampling_config.num_return_sequences or 1)
    if width > 1 and max(counts) > 1:
        return (
            f"num_return_sequences ({max(counts)}) of a request cannot be used with beam width {width}, which returns "
            "that many sequences itself"
        )
    draft = request.external_draft_tokens_config
    if draft is not None and draft.fast_logits:
        return "fast_logits are not supported by the embedded executor; send the draft logits"
    try:
        refuse_unsupported(request)
    except RuntimeError as error:
        return str(error)
    return None


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


def response_of(output: RequestOutput) -> Response:
    """Return the response that holds an output of the engine."""
    if output.error is not None:
        return Response(output.request_id, output.error, output.client_id)
    result = Result(
        is_final=output.is_last,
        output_token_ids=output.tokens,
        cum_log_probs=output.cum_log_probs,
        log_probs=output.log_probs,
        context_logits=output.context_logits,
        generation_logits=output.generation_logits,
        finish_reasons=output.reasons,
        sequence_index=output.index,
        is_sequence_final=output.ended,
        decoding_iter=output.iterations,
        request_perf_metrics=None if output.metrics is None else _perf_metrics(output.metrics),
    )
    return Response(output.request_id, result, output.client_id)


def _perf_metrics(metrics: RequestMetrics) -> RequestPerfMetrics:
    blocks = metrics.blocks
    return RequestPerfMetrics(
        TimingMetrics(
            arrival_time=timedelta(seconds=metrics.arrival),
            first_scheduled_time=timedelta(seconds=metrics.first_scheduled),
            first_token_time=timedelta(seconds=metrics.first_token),
            last_token_time=timedelta(seconds=metrics.last_token),
        ),
        KvCacheMetrics(
            num_total_allocated_blocks=blocks.total,
            num_new_allocated_blocks=blocks.new,
            num_reused_blocks=blocks.reused,
            num_missed_blocks=blocks.missed,
            kv_cache_hit_rate=_hit_rate(blocks.reused, blocks.missed),
        ),
        SpeculativeDecodingMetrics(
            acceptance_rate=metrics.accepted / metrics.drafted if metrics.drafted else 0.0,
            total_accepted_draft_tokens=metrics.accepted,
            total_draft_tokens=metrics.drafted,
        ),
        first_iter=metrics.first_iteration,
        last_iter=metrics.last_iteration,
        iter=metrics.last_iteration,
    )


def _hit_rate(reused: int, missed: int) -> float:
    """Return the part of the context blocks that were reused, or 0 if there were none."""
    return reused / (reused + missed) if reused + missed else 0.0


def iteration_stats(record: IterationRecord, limits: EngineLimits) -> IterationStats:
    """Return the statistics of an iteration."""
    static, inflight, drafts = None, None, record.drafts
    scheduled = record.contexts + record.generations
    if record.empty_slots is not None:
        static = StaticBatchingStats(
            num_scheduled_requests=scheduled,
            num_context_requests=record.contexts,
            num_ctx_tokens=record.context_tokens,
            num_gen_tokens=record.generated_tokens,
            empty_gen_slots=record.empty_slots,
        )
    else:
        inflight = InflightBatchingStats(
            num_scheduled_requests=scheduled,
            num_context_requests=record.contexts,
            num_gen_requests=record.generations,
            num_paused_requests=record.paused,
            num_ctx_tokens=record.context_tokens,
            avg_num_decoded_tokens_per_iter=(
                1 + record.right_guesses / record.generations if record.generations else 0.0
            ),
        )
    return IterationStats(
        # As upstream formats it: month-day-year, time with microseconds, local time zone.
        timestamp=datetime.fromtimestamp(record.time).strftime("%m-%d-%Y %H:%M:%S.%f"),
        iter=record.number,
        iter_latency_ms=record.seconds * 1000.0,
        new_active_requests_queue_latency_ms=record.queued_seconds * 1000.0,
        num_new_active_requests=record.started,
        num_active_requests=record.active,
        num_queued_requests=record.queued,
        num_completed_requests=record.completed,
        max_num_active_requests=limits.max_batch_size,
        cpu_mem_usage=record.memory,
        kv_cache_stats=KvCacheStats(
            max_num_blocks=record.blocks,
            free_num_blocks=record.free_blocks,
            used_num_blocks=record.blocks - record.free_blocks,
            tokens_per_block=record.tokens_per_block,
            alloc_total_blocks=record.use.total,
            alloc_new_blocks=record.use.new,
            reused_blocks=record.use.reused,
            missed_blocks=record.use.missed,
            cache_hit_rate=_hit_rate(record.use.reused, record.use.missed),
        ),
        static_batching_stats=static,
        inflight_batching_stats=inflight,
        specdec_stats=None
        if drafts is None
        else SpecDecodingStats(
            num_draft_tokens=drafts.drafted,
            num_accepted_tokens=drafts.accepted,
            num_requests_with_draft_tokens=drafts.requests,
            # The mean number of tokens that a request with drafts got: the accepted ones plus one.
            acceptance_length=1 + drafts.accepted / drafts.requests if drafts.requests else 0.0,
        ),
        max_batch_size_static=limits.max_batch_size,
        max_batch_size_runtime=limits.max_batch_size,
        max_num_tokens_static=limits.max_num_tokens,
        max_num_tokens_runtime=limits.max_num_tokens,
    )


def request_stats(record: RequestsRecord) -> RequestStatsPerIteration:
    """Return the statistics of all requests at an iteration."""
    return RequestStatsPerIteration(record.number, [_request_stats(each) for each in record.sequences])


def _request_stats(record: SequenceRecord) -> RequestStats:
    use = record.use
    return RequestStats(
        id=record.request_id,
        stage=record.stage,
        context_prefill_position=record.computed,
        num_generated_tokens=record.generated,
        avg_num_decoded_tokens_per_iter=record.generated / record.iterations if record.iterations else 0.0,
        scheduled=record.scheduled,
        paused=record.paused,
        alloc_total_blocks_per_request=use.total,
        alloc_new_blocks_per_request=use.new,
        reused_blocks_per_request=use.reused,
        missed_blocks_per_request=use.missed,
        kv_cache_hit_rate_per_request=_hit_rate(use.reused, use.missed),
    )

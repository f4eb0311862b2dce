"""Results of a request, its performance metrics, and statistics of iterations and requests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

import numpy as np

from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.engine.recorder import IterationRecord, RequestsRecord, SequenceRecord
from trtserve.executor.engine.requests import FinishReason, PromptLogProbs, RequestMetrics, RequestOutput, RequestStage


@dataclass(slots=True)
class TimingMetrics:
    """Times of the steady clock."""

    arrival_time: timedelta = timedelta()
    first_scheduled_time: timedelta = timedelta()
    first_token_time: timedelta = timedelta()
    last_token_time: timedelta = timedelta()
    kv_cache_transfer_start: timedelta = timedelta()
    kv_cache_transfer_end: timedelta = timedelta()
    kv_cache_size: int = 0


@dataclass(slots=True)
class KvCacheMetrics:
    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass(slots=True)
class SpeculativeDecodingMetrics:
    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass(slots=True)
class RequestPerfMetrics:
    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)
    first_iter: int | None = None
    last_iter: int | None = None
    iter: int | None = None


@dataclass(slots=True)
class Result:
    """The content of one response: tokens per beam, and what the request's OutputConfig asks for."""

    is_final: bool = False
    output_token_ids: list[list[int]] = field(default_factory=list)
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    context_logits: np.ndarray[Any, Any] | None = None
    generation_logits: np.ndarray[Any, Any] | None = None
    encoder_output: np.ndarray[Any, Any] | None = None
    finish_reasons: list[FinishReason] = field(default_factory=list)
    sequence_index: int = 0
    is_sequence_final: bool = False
    decoding_iter: int = 0
    context_phase_params: Any = None
    spec_dec_fast_logits_info: Any = None
    request_perf_metrics: RequestPerfMetrics | None = None
    additional_outputs: list[Any] = field(default_factory=list)
    top_log_probs: list[list[tuple[int, float]]] | None = None
    prompt_log_probs: PromptLogProbs | None = None
    prompt_tokens: int | None = None


class Response:
    """A result or an error of one request, built from (request_id, error_msg) or (request_id, result)."""

    __slots__ = ("_error", "_result", "client_id", "request_id")

    def __init__(
        self,
        request_id: int,
        content: str | Result | None = None,
        client_id: int | None = None,
        *,
        error_msg: str | None = None,
        result: Result | None = None,
    ) -> None:
        given = [value for value in (content, error_msg, result) if value is not None]
        if len(given) != 1 or not isinstance(given[0], (str, Result)):
            raise TypeError("Response() takes a request id and either an error message or a Result")
        self.request_id = request_id
        self.client_id = client_id
        self._error = given[0] if isinstance(given[0], str) else None
        self._result = given[0] if isinstance(given[0], Result) else None

    def has_error(self) -> bool:
        """True if the request failed; then there is no result."""
        return self._error is not None

    @property
    def error_msg(self) -> str:
        """Why the request failed. Raises RuntimeError if it did not."""
        if self._error is None:
            raise RuntimeError("The response holds a result, not an error")
        return self._error

    @property
    def result(self) -> Result:
        """The tokens. Raises RuntimeError if the request failed."""
        if self._result is None:
            raise RuntimeError(f"The response holds an error, not a result: {self._error}")
        return self._result

    def clear_context_logits(self) -> None:
        """Drop the context logits to save memory."""
        self.result.context_logits = None

    def clear_generation_logits(self) -> None:
        """Drop the generation logits to save memory."""
        self.result.generation_logits = None


_SPELLED = {"ms": "MS", "specdec": "specDec"}  # parts of upstream's keys that differ from plain camelCase


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return _SPELLED.get(head, head) + "".join(_SPELLED.get(part, part.capitalize()) for part in rest)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_camel(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def _to_json(record: Any) -> str:
    """Return JSON with upstream's camelCase keys; parts that do not apply are null."""
    return json.dumps(_plain(asdict(record)))


@dataclass(slots=True)
class KvCacheStats:
    """Blocks of the KV cache; used = max − free."""

    max_num_blocks: int = 0
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


@dataclass(slots=True)
class StaticBatchingStats:
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_ctx_tokens: int = 0
    num_gen_tokens: int = 0
    empty_gen_slots: int = 0


@dataclass(slots=True)
class InflightBatchingStats:
    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_ctx_tokens: int = 0
    micro_batch_id: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0


@dataclass(slots=True)
class SpecDecodingStats:
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests_with_draft_tokens: int = 0
    acceptance_length: float = 0.0
    iter_latency_ms: float = 0.0
    draft_overhead: float = 0.0


@dataclass(slots=True)
class IterationStats:
    """One iteration of the executor; memory in bytes, latencies in milliseconds.

    Upstream has the limits of batch size and tokens only in the JSON.
    """

    timestamp: str = ""
    iter: int = 0
    iter_latency_ms: float = 0.0
    new_active_requests_queue_latency_ms: float = 0.0
    num_new_active_requests: int = 0
    num_active_requests: int = 0
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    gpu_mem_usage: int = 0
    cpu_mem_usage: int = 0
    pinned_mem_usage: int = 0
    kv_cache_stats: KvCacheStats | None = None
    cross_kv_cache_stats: KvCacheStats | None = None
    static_batching_stats: StaticBatchingStats | None = None
    inflight_batching_stats: InflightBatchingStats | None = None
    specdec_stats: SpecDecodingStats | None = None
    max_batch_size_static: int = 0
    max_batch_size_tuner_recommended: int = 0
    max_batch_size_runtime: int = 0
    max_num_tokens_static: int = 0
    max_num_tokens_tuner_recommended: int = 0
    max_num_tokens_runtime: int = 0

    def to_json_str(self) -> str:
        return _to_json(self)


@dataclass(slots=True)
class DisServingRequestStats:
    kv_cache_transfer_ms: float = 0.0
    kv_cache_size: int = 0


@dataclass(slots=True)
class RequestStats:
    """One request at one iteration."""

    id: int = 0
    stage: RequestStage = RequestStage.QUEUED
    context_prefill_position: int = 0
    num_generated_tokens: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0
    scheduled: bool = False
    paused: bool = False
    dis_serving_stats: DisServingRequestStats | None = None
    alloc_total_blocks_per_request: int = 0
    alloc_new_blocks_per_request: int = 0
    reused_blocks_per_request: int = 0
    missed_blocks_per_request: int = 0
    kv_cache_hit_rate_per_request: float = 0.0

    def to_json_str(self) -> str:
        return _to_json(self)


@dataclass(slots=True)
class RequestStatsPerIteration:
    iter: int = 0
    request_stats: list[RequestStats] = field(default_factory=list)

    def to_json_str(self) -> str:
        return _to_json(self)


@dataclass(slots=True)
class DebugTensorsPerIteration:
    iter: int = 0
    debug_tensors: dict[str, Any] = field(default_factory=dict)


def response_of(output: RequestOutput) -> Response:
    """Return the response that holds an output of the engine."""
    if output.error is not None:
        return Response(output.request_id, output.error, output.client_id)
    result = Result(
        is_final=output.is_last,
        output_token_ids=output.tokens,
        cum_log_probs=output.cum_log_probs,
        log_probs=output.log_probs,
        top_log_probs=output.top_log_probs,
        prompt_log_probs=output.prompt_log_probs,
        prompt_tokens=output.prompt_tokens,
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

"""Iteration and request statistics of TensorRT-LLM's executor interface, and their JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from trtserve.executor.interface.enums import RequestStage

_SPELLED = {"ms": "MS", "specdec": "specDec"}
"""Parts of upstream's keys that differ from plain camelCase."""


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
        """Return the record as JSON."""
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
        """Return the record as JSON."""
        return _to_json(self)


@dataclass(slots=True)
class RequestStatsPerIteration:
    iter: int = 0
    request_stats: list[RequestStats] = field(default_factory=list)

    def to_json_str(self) -> str:
        """Return the record as JSON."""
        return _to_json(self)


@dataclass(slots=True)
class DebugTensorsPerIteration:
    iter: int = 0
    debug_tensors: dict[str, Any] = field(default_factory=dict)

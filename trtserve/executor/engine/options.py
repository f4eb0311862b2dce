"""The settings of one engine, beside what it was built with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trtserve.executor.engine.requests import PostProcessor


class CapacitySchedulerPolicy(Enum):
    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(Enum):
    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1


@dataclass(frozen=True, kw_only=True)
class KvCacheOptions:
    """Size and reuse of the KV cache."""

    max_tokens: int | None = None
    free_fraction: float | None = None
    """Largest part of the free memory."""
    max_bytes: int = 0
    """0: no limit."""
    windows: tuple[int, ...] = ()
    """Attention windows in tokens, cycled over the layers; empty: those of the model."""
    reuse: bool = False
    partial_reuse: bool = True
    copy_on_partial_reuse: bool = True


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The cache of LoRA adapters, in the units of TensorRT-LLM's PeftCacheConfig."""

    host_module_layers: int = 0
    device_module_layers: int = 0
    optimal_rank: int = 8
    max_rank: int = 64
    device_fraction: float | None = None
    """Part of the free memory for the adapters of a step."""
    host_bytes: int | None = None
    prefetch_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class GuideTokenizer:
    """The tokenizer of guided decoding."""

    text: str | None = None
    """A tokenizer.json."""
    vocabulary: list[str] | None = None
    """Plain tokens, instead of `text`."""
    ends: list[int] | None = None
    """The end tokens; by default those of `text`."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """All settings of one engine; the defaults are those of an ExecutorConfig."""

    max_beam_width: int = 1
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    chunked_context: bool = False
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    chunking: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    static_batching: bool = False
    """New requests start only when the last batch has ended, and nothing is streamed."""
    max_queue_size: int | None = None
    normalize_log_probs: bool = True
    generation_logits: bool = False
    """Also for an engine that was built without them."""
    kv_cache: KvCacheOptions = KvCacheOptions()
    adapters: AdapterOptions = AdapterOptions()
    guides: GuideTokenizer | None = None
    batched_post_processor: PostProcessor | None = None
    ngram_max_draft_len: int = 0
    """Most draft tokens that a step guesses from the text of a request."""
    refuse_long_sequences: bool = False
    """Fail when the KV cache cannot hold one sequence of max_seq_len, instead of reducing that."""
    iteration_records: int = 1000
    request_records: int = 0
    device_ids: tuple[int, ...] | None = None
    """The GPU of each rank."""

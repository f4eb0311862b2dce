"""The settings of one engine, and its limits: those that it was built with, narrowed by settings and KV cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.artifacts.engine_config import EngineConfig

if TYPE_CHECKING:  # NumPy costs every command a quarter of a second
    from trtserve.executor.engine.requests import PostProcessor

logger = logging.getLogger(__name__)


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
    free_fraction: float | None = None  # largest part of the free memory
    max_bytes: int = 0  # 0: no limit
    windows: tuple[int, ...] = ()  # attention windows in tokens, cycled over the layers; empty: those of the model
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
    device_fraction: float | None = None  # part of the free memory for the adapters of a step
    host_bytes: int | None = None
    prefetch_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class GuideTokenizer:
    """The tokenizer of guided decoding."""

    text: str | None = None  # a tokenizer.json
    vocabulary: list[str] | None = None  # plain tokens, instead of `text`
    ends: list[int] | None = None  # the end tokens; by default those of `text`


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """All settings of one engine; the defaults are those of an ExecutorConfig."""

    max_beam_width: int = 1
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    chunked_context: bool = False
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    chunking: ContextChunkingPolicy = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    static_batching: bool = False  # new requests start only when the last batch has ended, and nothing is streamed
    max_queue_size: int | None = None
    normalize_log_probs: bool = True
    generation_logits: bool = False  # also for an engine that was built without them
    kv_cache: KvCacheOptions = KvCacheOptions()
    adapters: AdapterOptions = AdapterOptions()
    guides: GuideTokenizer | None = None
    batched_post_processor: PostProcessor | None = None
    ngram_max_draft_len: int = 0  # most draft tokens that a step guesses from the text of a request
    refuse_long_sequences: bool = False
    """Fail when the KV cache cannot hold one sequence of max_seq_len, instead of reducing that."""
    iteration_records: int = 1000
    request_records: int = 0
    device_ids: tuple[int, ...] | None = None  # the GPU of each rank


DEFAULT_FREE_FRACTION = 0.3
"""Largest part of the free memory for the KV cache by default, where other programs share this memory."""

DEFAULT_DEVICE_FRACTION = 0.05
"""Largest part of the free memory for the adapters of a step by default."""

MOST_FREE_FRACTION = 0.9  # largest part of the free memory for an explicit number of tokens


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of an executor. Fields without a description have the names and meaning of TensorRT-LLM's build config."""

    max_batch_size: int  # requests per step
    max_seq_len: int  # tokens per sequence
    max_num_tokens: int  # tokens per step
    vocab_size: int
    max_beam_width: int = 1
    chunked: bool = False  # whether contexts may be split over several steps
    built_input_len: int | None = None  # longest prompt that the engine was built for, if its config has one
    windows: tuple[int, ...] = ()
    """Attention windows in tokens, cycled over the layers, or empty if all layers see whole sequences."""
    pauses: bool = False  # whether sequences may be paused
    long_rope_beyond: int | None = None
    """Number of tokens beyond which LongRoPE uses its long factors, or None if no sequence can be that long."""
    paged_context: bool = True
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    max_prompt_embedding_table_size: int = 0
    max_draft_len: int = 0
    speculative_decoding_mode: int = 1
    lora_plugin: str | None = None
    max_lora_rank: int = 64
    lora_target_modules: tuple[str, ...] = ()

    @property
    def max_input_len(self) -> int:
        """The longest prompt.

        TensorRT-LLM ignores the engine's `max_input_len` with packed input and paged attention; here it counts.
        """
        longest = self.max_seq_len - 1
        if self.built_input_len is not None:
            longest = min(longest, self.built_input_len)
        return longest if self.chunked else min(longest, self.max_num_tokens)

    @property
    def max_rows(self) -> int:
        """Number of rows in the block table: one per beam of each request."""
        return self.max_batch_size * self.max_beam_width

    def check_streaming(self, prompt_length: int, max_tokens: int) -> None:
        """Raise RuntimeError for a streamed request that could not continue after a pause."""
        longest = prompt_length + max_tokens - 1
        if self.pauses and not self.chunked and longest > self.max_input_len:
            raise RuntimeError(
                f"Prompt length + number of output tokens - 1 ({longest}) exceeds maximum input length "
                f"({self.max_input_len}); streaming with the MAX_UTILIZATION policy then needs chunked context"
            )


def resolve_limits(engine: EngineConfig, options: EngineOptions) -> EngineLimits:
    """Return the limits of `options` on an engine with config.json `engine`.

    Raises RuntimeError if `options` exceed them.
    """
    build = engine.build
    batch = _within_engine("max_batch_size", options.max_batch_size, build.max_batch_size)
    beams = _within_engine("max_beam_width", options.max_beam_width, build.max_beam_width)
    tokens = build.max_num_tokens
    if options.max_num_tokens is not None and options.max_num_tokens > tokens:
        logger.warning("max_num_tokens (%d) is above the engine's; using %d", options.max_num_tokens, tokens)
    elif options.max_num_tokens is not None:
        tokens = options.max_num_tokens
    paged = build.plugin_config.use_paged_context_fmha is not False
    if options.chunked_context and not paged:
        logger.warning("The engine was built without use_paged_context_fmha: chunked context is turned off")
    max_seq_len, windows = build.max_seq_len, options.kv_cache.windows
    if windows and min(windows) < 1:
        raise RuntimeError(f"max_attention_window ({min(windows)}) must be 1 or more")
    # Windows are cycled over the layers; without one that is shorter than the longest sequence there are none.
    if min(windows, default=max_seq_len) >= max_seq_len:
        windows = ()
    return EngineLimits(
        max_batch_size=batch,
        max_seq_len=max_seq_len,
        max_num_tokens=tokens,
        vocab_size=engine.model.vocab_size,
        max_beam_width=beams,
        built_input_len=build.max_input_len,
        windows=tuple(min(window, max_seq_len) for window in windows),
        pauses=options.policy is CapacitySchedulerPolicy.MAX_UTILIZATION,
        long_rope_beyond=_long_rope_beyond(engine.model, max_seq_len),
        chunked=options.chunked_context and paged,
        paged_context=paged,
        gather_context_logits=build.gather_context_logits,
        gather_generation_logits=build.gather_generation_logits,
        max_prompt_embedding_table_size=build.max_prompt_embedding_table_size,
        max_draft_len=build.max_draft_len,
        speculative_decoding_mode=int(build.speculative_decoding_mode or 1),
        lora_plugin=build.plugin_config.lora_plugin,
        max_lora_rank=build.lora_config.max_lora_rank,
        lora_target_modules=build.lora_config.lora_target_modules,
    )


def _long_rope_beyond(model: CheckpointConfig, max_seq_len: int) -> int | None:
    """Return the original positions of a model with LongRoPE if sequences may exceed them."""
    if model.position_embedding_type != "long_rope":
        return None
    original = model.original_max_position_embeddings
    return original if max_seq_len > original else None


def _within_engine(name: str, wanted: int | None, built: int) -> int:
    if wanted is not None and wanted > built:
        raise RuntimeError(
            f"{name} ({wanted}) is larger than the engine's {name} ({built}); build the engine with a larger value"
        )
    return built if wanted is None else wanted


def kv_cache_blocks(
    options: KvCacheOptions,
    limits: EngineLimits,
    *,
    tokens_per_block: int,
    bytes_per_block: int,
    free_memory: int,
    default_fraction: float = DEFAULT_FREE_FRACTION,
) -> int:
    """Return the number of KV blocks to allocate; `free_memory` in bytes.

    The default is enough for the largest batch of the longest sequences (with all beams), but at most
    `default_fraction` of the free memory. `max_tokens` and `free_gpu_memory_fraction` override that; the smaller one
    counts. Raises RuntimeError when not even one block fits.
    """
    default = limits.max_rows * -(-limits.max_seq_len // tokens_per_block)
    wanted = default if options.max_tokens is None else -(-options.max_tokens // tokens_per_block)
    fraction = options.free_fraction
    if fraction is None:
        fraction = default_fraction if options.max_tokens is None else MOST_FREE_FRACTION
    elif options.max_tokens is None:
        wanted = free_memory // bytes_per_block
    fitting = int(fraction * free_memory) // bytes_per_block
    if options.max_bytes:
        fitting = min(fitting, options.max_bytes // bytes_per_block)
    if min(wanted, fitting) < 1:
        raise RuntimeError(
            f"The KV cache has room for {fitting * tokens_per_block} tokens of {wanted * tokens_per_block} wanted, "
            f"less than one block of {tokens_per_block}: {free_memory} bytes of memory are free, fraction {fraction}. "
            "Free memory, or raise kv_cache_free_gpu_mem_fraction or max_tokens_in_paged_kv_cache"
        )
    return min(wanted, fitting)


_MOST_KEPT = 4
_KEPT_PART = 0.25


def state_rows(limits: EngineLimits, *, bytes_per_state: int, memory: int, reuse: bool) -> int:
    """Return how many rows of states to allocate in `memory` bytes for states, keys and values.

    Every sequence has one. With `reuse` there are up to four more for each, in at most a quarter of the memory. Raises
    RuntimeError when those of the sequences do not fit.
    """
    if not bytes_per_state:
        return 0
    if limits.max_rows * bytes_per_state > memory:
        raise RuntimeError(
            f"The states of {limits.max_rows} sequences need {limits.max_rows * bytes_per_state} bytes; {memory} are "
            "free for them. Free memory, or build the engine with a smaller --max-batch-size"
        )
    kept = min(_MOST_KEPT * limits.max_rows, int(_KEPT_PART * memory) // bytes_per_state) if reuse else 0
    return limits.max_rows + kept


def fit_to_cache(limits: EngineLimits, *, cache_tokens: int, tokens_per_block: int, fail: bool) -> EngineLimits:
    """Reduce max_seq_len to what the cache holds with all beams; RuntimeError instead if `fail`.

    Attention windows make no difference: the cache keeps whole sequences.
    """
    beams = limits.max_beam_width
    blocks = cache_tokens // tokens_per_block // beams
    if blocks * tokens_per_block >= limits.max_seq_len:
        return limits
    each = f" of {beams} beams" if beams > 1 else ""
    text = f"The KV cache holds {cache_tokens} tokens, less than one sequence{each} of max_seq_len {limits.max_seq_len}"
    if fail or blocks == 0:
        least = beams * tokens_per_block * (-(-limits.max_seq_len // tokens_per_block) if fail else 1)
        raise RuntimeError(
            f"{text}. Raise kv_cache_free_gpu_mem_fraction, or max_tokens_in_paged_kv_cache to {least} or more"
        )
    logger.warning("%s; max_seq_len is reduced to %d", text, blocks * tokens_per_block)
    return replace(limits, max_seq_len=blocks * tokens_per_block)

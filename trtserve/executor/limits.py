"""What one executor can take: the engine's limits, narrowed by the executor's configuration and its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtserve.executor.configs import ExecutorConfig, KvCacheConfig
from trtserve.executor.enums import CapacitySchedulerPolicy

logger = logging.getLogger(__name__)

DEFAULT_FREE_FRACTION = 0.3
"""Part of the free memory that the KV cache takes at most when nobody says anything."""

MOST_FREE_FRACTION = 0.9
"""Part of the free memory that an explicit token count may reach."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Tokens per sequence (`max_seq_len`), per step (`max_num_tokens`), requests per step (`max_batch_size`).

    `built_input_len` is the longest prompt that the engine was built for, where its config says one. `windows` are the
    attention windows in tokens, cycled over the layers; none when all layers see whole sequences. `pauses` tells that
    sequences may be paused. `long_beyond` is the number of tokens beyond which LongRoPE rotates a sequence otherwise,
    None where none can be so long. The rest says what the engine was built with, by the names of TensorRT-LLM's build
    config.
    """

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    vocab_size: int
    max_beam_width: int = 1
    chunked: bool = False
    built_input_len: int | None = None
    windows: tuple[int, ...] = ()
    pauses: bool = False
    long_beyond: int | None = None
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
        """The longest prompt: reference section 2.8, packed input with paged attention, and what the engine says.

        Upstream has nothing but the former, since its engines take packed input whatever `max_input_len` was.
        """
        longest = self.max_seq_len - 1
        if self.built_input_len is not None:
            longest = min(longest, self.built_input_len)
        return longest if self.chunked else min(longest, self.max_num_tokens)

    @property
    def max_rows(self) -> int:
        """Rows of the block table: one per beam of each request."""
        return self.max_batch_size * self.max_beam_width

    def check_streaming(self, prompt_length: int, max_tokens: int) -> None:
        """Refuse (RuntimeError) a streamed request that could not go on after a pause: reference section 2.8."""
        longest = prompt_length + max_tokens - 1
        if self.pauses and not self.chunked and longest > self.max_input_len:
            raise RuntimeError(
                f"Prompt length + number of output tokens - 1 ({longest}) exceeds maximum input length "
                f"({self.max_input_len}); streaming with the MAX_UTILIZATION policy needs chunked context then"
            )


def resolve_limits(engine: Mapping[str, Any], config: ExecutorConfig) -> Limits:
    """Limits of `config` on an engine whose `config.json` is `engine`; RuntimeError where it asks for more."""
    build = engine["build_config"]
    batch = _within_engine("max_batch_size", config.max_batch_size, int(build["max_batch_size"]))
    beams = _within_engine("max_beam_width", config.max_beam_width, int(build.get("max_beam_width", 1)))
    tokens = int(build["max_num_tokens"])
    if config.max_num_tokens is not None and config.max_num_tokens > tokens:
        logger.warning("max_num_tokens (%d) is above the engine's; using %d", config.max_num_tokens, tokens)
    elif config.max_num_tokens is not None:
        tokens = config.max_num_tokens
    return Limits(
        max_batch_size=batch,
        max_seq_len=int(build["max_seq_len"]),
        max_num_tokens=tokens,
        vocab_size=int(engine["pretrained_config"]["vocab_size"]),
        max_beam_width=beams,
        built_input_len=int(build["max_input_len"]) if "max_input_len" in build else None,
        windows=_windows(config.kv_cache_config.max_attention_window, int(build["max_seq_len"])),
        pauses=config.scheduler_config.capacity_scheduler_policy is CapacitySchedulerPolicy.MAX_UTILIZATION,
        long_beyond=_long_beyond(engine["pretrained_config"], int(build["max_seq_len"])),
        **_chunking(build, config),
        **_features(build),
    )


def _features(build: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine was built with; defaults are TensorRT-LLM's."""
    lora = build.get("lora_config") or {}
    return {
        "gather_context_logits": bool(build.get("gather_context_logits", False)),
        "gather_generation_logits": bool(build.get("gather_generation_logits", False)),
        "max_prompt_embedding_table_size": int(build.get("max_prompt_embedding_table_size") or 0),
        "max_draft_len": int(build.get("max_draft_len") or 0),
        "speculative_decoding_mode": int(build.get("speculative_decoding_mode") or 1),
        "lora_plugin": (build.get("plugin_config") or {}).get("lora_plugin"),
        "max_lora_rank": int(lora.get("max_lora_rank", 64)),
        "lora_target_modules": tuple(lora.get("lora_target_modules") or ()),
    }


def _chunking(build: Mapping[str, Any], config: ExecutorConfig) -> dict[str, Any]:
    """Chunked contexts need paged context attention; without it they are turned off with a warning."""
    paged = bool((build.get("plugin_config") or {}).get("use_paged_context_fmha", True))
    if config.enable_chunked_context and not paged:
        logger.warning("The engine was built without use_paged_context_fmha: chunked context is turned off")
    return {"chunked": config.enable_chunked_context and paged, "paged_context": paged}


def _windows(windows: list[int] | None, max_seq_len: int) -> tuple[int, ...]:
    """Windows as layers take them in turn; a window as long as the sequences changes nothing."""
    if windows and min(windows) < 1:
        raise RuntimeError(f"max_attention_window ({min(windows)}) must be 1 or more")
    if not windows or min(windows) >= max_seq_len:
        return ()
    return tuple(min(window, max_seq_len) for window in windows)


def _long_beyond(model: Mapping[str, Any], max_seq_len: int) -> int | None:
    """The original positions of a model with LongRoPE, when sequences may exceed them."""
    if model.get("position_embedding_type") != "long_rope":
        return None
    original = int(model["original_max_position_embeddings"])
    return original if max_seq_len > original else None


def _within_engine(name: str, wanted: int | None, built: int) -> int:
    if wanted is not None and wanted > built:
        raise RuntimeError(
            f"{name} ({wanted}) is larger than the engine's {name} ({built}); build the engine with more"
        )
    return built if wanted is None else wanted


def kv_cache_blocks(
    config: KvCacheConfig, limits: Limits, *, tokens_per_block: int, bytes_per_block: int, free_memory: int
) -> int:
    """How many KV blocks to allocate.

    By default what the largest batch of the longest sequences (of all beams) needs, but at most 0.3 of the free
    memory (bytes).
    `max_tokens` and `free_gpu_memory_fraction` override that; given both, the smaller counts. RuntimeError when not
    even one block fits.
    """
    whole = limits.max_rows * -(-limits.max_seq_len // tokens_per_block)
    wanted = whole if config.max_tokens is None else -(-config.max_tokens // tokens_per_block)
    fraction = config.free_gpu_memory_fraction
    if fraction is None:
        fraction = DEFAULT_FREE_FRACTION if config.max_tokens is None else MOST_FREE_FRACTION
    elif config.max_tokens is None:
        wanted = free_memory // bytes_per_block
    fitting = int(fraction * free_memory) // bytes_per_block
    if config.max_gpu_total_bytes:
        fitting = min(fitting, config.max_gpu_total_bytes // bytes_per_block)
    if min(wanted, fitting) < 1:
        raise RuntimeError(
            f"The KV cache has room for {fitting * tokens_per_block} tokens of {wanted * tokens_per_block} wanted, "
            f"less than one block of {tokens_per_block}: {free_memory} bytes of memory are free, fraction {fraction}. "
            "Free memory, or raise kv_cache_free_gpu_mem_fraction or max_tokens_in_paged_kv_cache"
        )
    return min(wanted, fitting)


def fit_to_cache(limits: Limits, *, cache_tokens: int, tokens_per_block: int, fail: bool) -> Limits:
    """Shorten the sequences that the cache cannot hold with all their beams; RuntimeError instead when `fail`.

    Windows do not help: the cache keeps whole sequences.
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
    logger.warning("%s; max_seq_len becomes %d", text, blocks * tokens_per_block)
    return replace(limits, max_seq_len=blocks * tokens_per_block)

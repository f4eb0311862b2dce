"""What one executor can take: the engine's limits, narrowed by the executor's configuration and its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtserve.executor.configs import ExecutorConfig, KvCacheConfig

logger = logging.getLogger(__name__)

DEFAULT_FREE_FRACTION = 0.3
"""Part of the free memory that the KV cache takes at most when nobody says anything."""

MOST_FREE_FRACTION = 0.9
"""Part of the free memory that an explicit token count may reach."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Tokens per sequence (`max_seq_len`), per step (`max_num_tokens`), requests per step (`max_batch_size`).

    `built_input_len` is the longest prompt that the engine was built for, where its config says one.
    """

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    vocab_size: int
    max_beam_width: int = 1
    chunked: bool = False
    built_input_len: int | None = None

    @property
    def max_input_len(self) -> int:
        """The longest prompt: reference section 2.8, packed input with paged attention, and what the engine says.

        Upstream has nothing but the former, since its engines take packed input whatever `max_input_len` was.
        """
        longest = self.max_seq_len - 1
        if self.built_input_len is not None:
            longest = min(longest, self.built_input_len)
        return longest if self.chunked else min(longest, self.max_num_tokens)


def resolve_limits(engine: Mapping[str, Any], config: ExecutorConfig) -> Limits:
    """Limits of `config` on an engine whose `config.json` is `engine`; RuntimeError where it asks for more."""
    build = engine["build_config"]
    batch = _within_engine("max_batch_size", config.max_batch_size, int(build["max_batch_size"]))
    beams = _within_engine("max_beam_width", config.max_beam_width, int(build.get("max_beam_width", 1)))
    _check_window(config.kv_cache_config.max_attention_window, int(build["max_seq_len"]))
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
        chunked=config.enable_chunked_context,
        built_input_len=int(build["max_input_len"]) if "max_input_len" in build else None,
    )


def _within_engine(name: str, wanted: int | None, built: int) -> int:
    if wanted is not None and wanted > built:
        raise RuntimeError(
            f"{name} ({wanted}) is larger than the engine's {name} ({built}); build the engine with more"
        )
    return built if wanted is None else wanted


def _check_window(window: list[int] | None, max_seq_len: int) -> None:
    """A window as long as the sequences changes nothing; a shorter one would change results."""
    if window and min(window) < max_seq_len:
        raise RuntimeError(
            f"max_attention_window ({min(window)}) below max_seq_len ({max_seq_len}) is not supported by the embedded "
            "executor; leave it out, or build the engine with a smaller max_seq_len"
        )


def kv_cache_blocks(
    config: KvCacheConfig, limits: Limits, *, tokens_per_block: int, bytes_per_block: int, free_memory: int
) -> int:
    """How many KV blocks to allocate.

    By default what the largest batch of the longest sequences needs, but at most 0.3 of the free memory (bytes).
    `max_tokens` and `free_gpu_memory_fraction` override that; given both, the smaller counts. RuntimeError when not
    even one block fits.
    """
    whole = limits.max_batch_size * -(-limits.max_seq_len // tokens_per_block)
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


def fit_to_cache(limits: Limits, *, cache_tokens: int, fail: bool) -> Limits:
    """Shorten the sequences that the cache cannot hold, with a warning; RuntimeError instead when `fail`."""
    if cache_tokens >= limits.max_seq_len:
        return limits
    text = f"The KV cache holds {cache_tokens} tokens, less than one sequence of max_seq_len {limits.max_seq_len}"
    if fail:
        raise RuntimeError(text)
    logger.warning("%s; max_seq_len becomes %d", text, cache_tokens)
    return replace(limits, max_seq_len=cache_tokens)

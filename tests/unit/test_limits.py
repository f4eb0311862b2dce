"""Limits of an executor from its engine, its configuration and the memory."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from trtserve.executor.admission import admit
from trtserve.executor.api import ExecutorConfig, KvCacheConfig, Request
from trtserve.executor.limits import Limits, fit_to_cache, kv_cache_blocks, resolve_limits

ENGINE: dict[str, Any] = {
    "build_config": {"max_batch_size": 8, "max_seq_len": 100, "max_num_tokens": 64, "max_beam_width": 1},
    "pretrained_config": {"vocab_size": 97},
}
LIMITS = Limits(max_batch_size=8, max_seq_len=100, max_num_tokens=64, vocab_size=97)


def _blocks(config: KvCacheConfig, free: int = 10**9) -> int:
    return kv_cache_blocks(config, LIMITS, tokens_per_block=16, bytes_per_block=1000, free_memory=free)


def test_the_engine_gives_the_limits() -> None:
    assert resolve_limits(ENGINE, ExecutorConfig()) == LIMITS
    assert resolve_limits(ENGINE, ExecutorConfig(max_batch_size=2, max_num_tokens=10)).max_num_tokens == 10


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ExecutorConfig(max_batch_size=9), r"max_batch_size \(9\) is larger than the engine's max_batch_size \(8\)"),
        (ExecutorConfig(max_beam_width=2), "max_beam_width"),
        (ExecutorConfig(kv_cache_config=KvCacheConfig(max_attention_window=[50])), "max_attention_window"),
    ],
)
def test_more_than_the_engine_is_refused(config: ExecutorConfig, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        resolve_limits(ENGINE, config)


def test_more_tokens_per_step_than_the_engine_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_limits(ENGINE, ExecutorConfig(max_num_tokens=65)).max_num_tokens == 64
    assert "above the engine's" in caplog.text


def test_the_longest_prompt_depends_on_chunking() -> None:
    assert LIMITS.max_input_len == 64
    assert resolve_limits(ENGINE, ExecutorConfig(enable_chunked_context=True)).max_input_len == 99


@pytest.mark.parametrize(
    ("built", "chunked", "longest"), [(16, False, 16), (80, False, 64), (80, True, 80), (100, True, 99)]
)
def test_the_engine_bounds_the_prompt(built: int, chunked: bool, longest: int) -> None:
    engine = {**ENGINE, "build_config": {**ENGINE["build_config"], "max_input_len": built}}
    limits = resolve_limits(engine, ExecutorConfig(enable_chunked_context=chunked))
    assert limits.max_input_len == longest
    admit(Request([1] * longest, 1), 1, limits)
    message = rf"Prompt length \({longest + 1}\) exceeds maximum input length \({longest}\)"
    with pytest.raises(RuntimeError, match=message):
        admit(Request([1] * (longest + 1), 1), 2, limits)


@pytest.mark.parametrize(
    ("config", "free", "expected"),
    [
        ({}, 10**9, 56),  # 8 sequences of 7 blocks
        ({}, 100_000, 30),  # 0.3 of the free memory
        ({"max_tokens": 50}, 10**9, 4),
        ({"max_tokens": 10_000}, 100_000, 90),  # 0.9 of the free memory
        ({"free_gpu_memory_fraction": 0.5}, 100_000, 50),
        ({"free_gpu_memory_fraction": 0.5, "max_tokens": 160}, 100_000, 10),
        ({"max_gpu_total_bytes": 5_000}, 100_000, 5),
    ],
)
def test_blocks_of_the_kv_cache(config: dict[str, Any], free: int, expected: int) -> None:
    assert _blocks(KvCacheConfig(**config), free) == expected


def test_no_room_for_a_block_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="room for 0 tokens"):
        _blocks(KvCacheConfig(), free=1000)


def test_a_small_cache_shortens_the_sequences(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert fit_to_cache(LIMITS, cache_tokens=48, fail=False).max_seq_len == 48
    assert "max_seq_len becomes 48" in caplog.text
    with pytest.raises(RuntimeError, match="less than one sequence"):
        fit_to_cache(LIMITS, cache_tokens=48, fail=True)
    assert fit_to_cache(LIMITS, cache_tokens=100, fail=True) is LIMITS

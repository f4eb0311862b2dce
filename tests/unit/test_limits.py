"""Limits of an executor from its engine, its configuration and the memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.executor.engine.limits import (
    CapacitySchedulerPolicy,
    EngineLimits,
    EngineOptions,
    KvCacheOptions,
    fit_to_cache,
    kv_cache_blocks,
    resolve_limits,
)

ENGINE = EngineConfig.of(
    {
        "build_config": {"max_batch_size": 8, "max_seq_len": 100, "max_num_tokens": 64, "max_beam_width": 1},
        "pretrained_config": {"vocab_size": 97},
    }
)
LIMITS = EngineLimits(max_batch_size=8, max_seq_len=100, max_num_tokens=64, vocab_size=97)


def _blocks(config: KvCacheOptions, free: int = 10**9) -> int:
    return kv_cache_blocks(config, LIMITS, tokens_per_block=16, bytes_per_block=1000, free_memory=free)


def test_limits_come_from_the_engine() -> None:
    assert resolve_limits(ENGINE, EngineOptions()) == LIMITS
    assert resolve_limits(ENGINE, EngineOptions(max_batch_size=2, max_num_tokens=10)).max_num_tokens == 10


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineOptions(max_batch_size=9), r"max_batch_size \(9\) is larger than the engine's max_batch_size \(8\)"),
        (EngineOptions(max_beam_width=2), "max_beam_width"),
        (EngineOptions(kv_cache=KvCacheOptions(windows=(50, 0))), "max_attention_window"),
    ],
)
def test_values_above_the_engine_are_refused(config: EngineOptions, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        resolve_limits(ENGINE, config)


def test_max_num_tokens_above_the_engine_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve_limits(ENGINE, EngineOptions(max_num_tokens=65)).max_num_tokens == 64
    assert "above the engine's" in caplog.text


def test_longest_prompt_depends_on_chunking() -> None:
    assert LIMITS.max_input_len == 64
    assert resolve_limits(ENGINE, EngineOptions(chunked_context=True)).max_input_len == 99


@pytest.mark.parametrize(
    ("built", "chunked", "longest"), [(16, False, 16), (80, False, 64), (80, True, 80), (100, True, 99)]
)
def test_max_input_len_limits_the_prompt(built: int, chunked: bool, longest: int) -> None:
    limits = resolve_limits(ENGINE.with_build(max_input_len=built), EngineOptions(chunked_context=chunked))
    assert limits.max_input_len == longest


def _built(**flags: Any) -> EngineLimits:
    return resolve_limits(ENGINE.with_build(**flags), EngineOptions())


def test_features_come_from_the_build_config() -> None:
    built = _built(
        gather_context_logits=True,
        gather_generation_logits=True,
        max_prompt_embedding_table_size=64,
        max_draft_len=8,
        speculative_decoding_mode=2,
        lora_config={"max_lora_rank": 8, "lora_target_modules": ["attn_q", "attn_v"]},
        plugin_config={"lora_plugin": "float32", "use_paged_context_fmha": False},
    )
    assert built == replace(
        LIMITS,
        gather_context_logits=True,
        gather_generation_logits=True,
        max_prompt_embedding_table_size=64,
        max_draft_len=8,
        speculative_decoding_mode=2,
        lora_plugin="float32",
        max_lora_rank=8,
        lora_target_modules=("attn_q", "attn_v"),
        paged_context=False,
    )


def test_chunking_needs_paged_context(caplog: pytest.LogCaptureFixture) -> None:
    engine = ENGINE.with_build(plugin_config={"use_paged_context_fmha": False})
    with caplog.at_level(logging.WARNING):
        limits = resolve_limits(engine, EngineOptions(chunked_context=True))
    assert (limits.chunked, limits.paged_context) == (False, False)
    assert "chunked context is turned off" in caplog.text


@pytest.mark.parametrize(
    ("asked", "windows"), [((100,), ()), ((200, 300), ()), ((50,), (50,)), ((50, 200), (50, 100)), ((), ())]
)
def test_attention_windows(asked: tuple[int, ...], windows: tuple[int, ...]) -> None:
    config = EngineOptions(kv_cache=KvCacheOptions(windows=asked))
    assert resolve_limits(ENGINE, config).windows == windows


@pytest.mark.parametrize(
    ("policy", "chunked", "refused"), [("MAX", False, True), ("MAX", True, False), ("GUA", False, False)]
)
def test_streaming_that_may_be_paused_must_fit_a_step(policy: str, chunked: bool, refused: bool) -> None:
    (chosen,) = [each for each in CapacitySchedulerPolicy if each.name.startswith(policy)]
    config = EngineOptions(policy=chosen, chunked_context=chunked)
    limits = resolve_limits(ENGINE, config)
    limits.check_streaming(60, 5)
    if refused:
        with pytest.raises(RuntimeError, match=r"\(65\) exceeds maximum input length \(64\)"):
            limits.check_streaming(60, 6)
    else:
        limits.check_streaming(60, 6)


@pytest.mark.parametrize(
    ("config", "free", "expected"),
    [
        ({}, 10**9, 56),  # 8 sequences of 7 blocks
        ({}, 100_000, 30),  # 0.3 of the free memory
        ({"max_tokens": 50}, 10**9, 4),
        ({"max_tokens": 10_000}, 100_000, 90),  # 0.9 of the free memory
        ({"free_fraction": 0.5}, 100_000, 50),
        ({"free_fraction": 0.5, "max_tokens": 160}, 100_000, 10),
        ({"max_bytes": 5_000}, 100_000, 5),
    ],
)
def test_number_of_kv_cache_blocks(config: dict[str, Any], free: int, expected: int) -> None:
    assert _blocks(KvCacheOptions(**config), free) == expected


def test_too_little_memory_for_a_block_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="room for 0 tokens"):
        _blocks(KvCacheOptions(), free=1000)


def test_beams_need_their_own_blocks() -> None:
    limits = replace(LIMITS, max_beam_width=4)
    config = KvCacheOptions()
    assert kv_cache_blocks(config, limits, tokens_per_block=16, bytes_per_block=1000, free_memory=10**9) == 4 * 56


def test_small_cache_reduces_max_seq_len(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert fit_to_cache(LIMITS, cache_tokens=48, tokens_per_block=16, fail=False).max_seq_len == 48
    assert "max_seq_len is reduced to 48" in caplog.text
    with pytest.raises(RuntimeError, match=r"less than one sequence.*max_tokens_in_paged_kv_cache to 112 or more"):
        fit_to_cache(LIMITS, cache_tokens=48, tokens_per_block=16, fail=True)
    assert fit_to_cache(LIMITS, cache_tokens=112, tokens_per_block=16, fail=True) is LIMITS


def test_cache_must_hold_all_beams_of_a_sequence() -> None:
    limits = replace(LIMITS, max_beam_width=3)
    assert fit_to_cache(limits, cache_tokens=3 * 112, tokens_per_block=16, fail=True) is limits
    assert fit_to_cache(limits, cache_tokens=3 * 112 - 16, tokens_per_block=16, fail=False).max_seq_len == 96
    with pytest.raises(RuntimeError, match=r"one sequence of 3 beams.* to 48 or more"):
        fit_to_cache(limits, cache_tokens=32, tokens_per_block=16, fail=False)

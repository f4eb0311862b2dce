"""The interface classes: keywords, defaults, conversions and checks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from trtserve.executor import api


def test_the_keywords_of_all_releases_are_accepted() -> None:
    sampling = api.SamplingConfig(beam_width=1, top_k=2, min_p=0.5)
    for name in ("max_tokens", "max_new_tokens"):
        request = api.Request(input_token_ids=[1, 2], sampling_config=sampling, **{name: 5})
        assert (request.max_tokens, request.max_new_tokens) == (5, 5)
    config = api.ExecutorConfig(kv_cache_config=api.KvCacheConfig(max_tokens=10))
    assert config.kv_cache_config.max_tokens == 10
    assert (config.iter_stats_max_iterations, config.request_stats_max_iterations) == (1000, 0)
    assert api.KvCacheConfig().enable_block_reuse
    assert api.Response(0, api.Result()).result.is_final is False
    assert api.Response(0, "internal error").has_error()


def test_other_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'return_everything'"):
        api.OutputConfig(return_everything=True)
    with pytest.raises(TypeError, match="two values for 'beam_width'"):
        api.SamplingConfig(1, beam_width=1)


def test_repositories_of_earlier_versions_ask_for_a_release() -> None:
    assert api.for_release("0.16").Executor is api.Executor


def test_none_for_a_bool_is_false() -> None:
    assert api.Request([1], max_tokens=1, streaming=None).streaming is False


def test_positional_arguments() -> None:
    sampling = api.SamplingConfig(1, 4, 0.5, 0.1, 7, 0.9, 42, 0.8, 3)
    assert (sampling.random_seed, sampling.temperature, sampling.min_length) == (42, 0.8, 3)
    assert api.Request([1], 9, True).streaming
    with pytest.raises(TypeError, match="positional"):
        api.LoraConfig(1, None, None, None)


def test_missing_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="missing required argument 'max_tokens'"):
        api.Request([1])
    with pytest.raises(TypeError, match="input_token_ids"):
        api.Request(max_tokens=1)


def test_newer_name_takes_precedence() -> None:
    sampling = api.SamplingConfig(random_seed=1, seed=2, min_length=5)
    assert (sampling.seed, sampling.random_seed, sampling.min_tokens, sampling.min_length) == (2, 2, 5, 5)
    assert api.Request([1], max_tokens=3, max_new_tokens=4).max_new_tokens == 3


BAD_VALUES: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "beam_width 0": (lambda: api.SamplingConfig(0), RuntimeError),
    "beam_width 1025": (lambda: api.SamplingConfig(1025), RuntimeError),
    "top_k": (lambda: api.SamplingConfig(top_k=-1), RuntimeError),
    "top_p 0": (lambda: api.SamplingConfig(top_p=0.0), RuntimeError),
    "top_p above 1": (lambda: api.SamplingConfig(top_p=1.5), RuntimeError),
    "temperature": (lambda: api.SamplingConfig(temperature=-0.1), RuntimeError),
    "repetition": (lambda: api.SamplingConfig(repetition_penalty=0.0), RuntimeError),
    "repetition that makes logits infinite": (lambda: api.SamplingConfig(repetition_penalty=1e-38), RuntimeError),
    "repetition that makes logits 0": (lambda: api.SamplingConfig(repetition_penalty=1e38), RuntimeError),
    "frequency": (lambda: api.SamplingConfig(frequency_penalty=-3e38), RuntimeError),
    "presence": (lambda: api.SamplingConfig(presence_penalty=3e38), RuntimeError),
    "sequences": (lambda: api.SamplingConfig(2, num_return_sequences=3), RuntimeError),
    "top_k text": (lambda: api.SamplingConfig(top_k="4"), TypeError),
    "top_k float": (lambda: api.SamplingConfig(top_k=4.0), TypeError),
    "seed negative": (lambda: api.SamplingConfig(seed=-1), TypeError),
    "empty prompt": (lambda: api.Request([], 1), RuntimeError),
    "max_tokens 0": (lambda: api.Request([1], 0), RuntimeError),
    "prompt text": (lambda: api.Request("abc", 1), TypeError),
    "prompt of floats": (lambda: api.Request([1.5], 1), TypeError),
    "prompt nested": (lambda: api.Request([[1]], 1), TypeError),
    "token too large": (lambda: api.Request([2**31], 1), TypeError),
    "bias of two dimensions": (lambda: api.Request([1], 1, embedding_bias=np.zeros((1, 2))), RuntimeError),
    "bias as list": (lambda: api.Request([1], 1, embedding_bias=[0.0]), TypeError),
    "sampling of another class": (lambda: api.Request([1], 1, sampling_config=api.OutputConfig()), TypeError),
    "guided beams": (
        lambda: api.Request(
            [1],
            1,
            sampling_config=api.SamplingConfig(2),
            guided_decoding_params=api.GuidedDecodingParams(api.GuidedDecodingParams.GuideType.JSON),
        ),
        RuntimeError,
    ),
    "guide missing": (lambda: api.GuidedDecodingParams(api.GuidedDecodingParams.GuideType.REGEX), RuntimeError),
    "no draft tokens": (lambda: api.ExternalDraftTokensConfig([]), RuntimeError),
    "draft logits": (lambda: api.ExternalDraftTokensConfig([1], np.zeros((2, 5))), RuntimeError),
    "threshold": (lambda: api.ExternalDraftTokensConfig([1], acceptance_threshold=0.0), RuntimeError),
    "lora weights alone": (lambda: api.LoraConfig(1, np.zeros((1, 2))), RuntimeError),
    "prompt table": (lambda: api.PromptTuningConfig(np.zeros(3)), RuntimeError),
    "beam width": (lambda: api.ExecutorConfig(0), RuntimeError),
    "batch size": (lambda: api.ExecutorConfig(max_batch_size=0), RuntimeError),
    "stats size": (lambda: api.ExecutorConfig(iter_stats_max_iterations=-1), RuntimeError),
    "idle time": (lambda: api.ExecutorConfig(max_seq_idle_microseconds=0), RuntimeError),
    "response of nothing": (lambda: api.Response(1), TypeError),
}


@pytest.mark.parametrize(("build", "error"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_invalid_values_are_refused_at_construction(build: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        build()


def test_retention_ranges_are_sorted_and_do_not_overlap() -> None:
    item = api.KvCacheRetentionConfig.TokenRangeRetentionConfig
    ranges = [item(0, 4, 50), item(np.int32(4), None, 90, timedelta(seconds=1))]
    assert api.KvCacheRetentionConfig(ranges).decode_retention_priority == 35
    assert api.KvCacheRetentionConfig(ranges, decode_duration_ms=20).decode_duration_ms == timedelta(milliseconds=20)
    for wrong in ([item(-1, 8, 1)], [item(4, 8, 1), item(0, 4, 1)], [item(0, None, 1), item(4, 8, 1)], [item(3, 3, 1)]):
        with pytest.raises(ValueError, match="token range"):
            api.KvCacheRetentionConfig(wrong)
    with pytest.raises(RuntimeError, match="priority"):
        item(0, 4, 101)


def test_lists_are_copied() -> None:
    tokens, words = [1, 2], [[3]]
    request = api.Request(tokens, 1, stop_words=words)
    tokens.append(9)
    words[0].append(9)
    request.input_token_ids.append(9)
    assert request.stop_words is not None
    request.stop_words[0].append(9)
    assert (request.input_token_ids, request.stop_words) == ([1, 2], [[3]])
    assert api.Request(np.array([1, 2], np.int32), np.int32(3)).input_token_ids == [1, 2]


def test_writable_properties() -> None:
    request = api.Request([1], 1)
    request.streaming = True
    request.request_type = api.RequestType.REQUEST_TYPE_CONTEXT_ONLY
    assert request.type is api.RequestType.REQUEST_TYPE_CONTEXT_ONLY
    with pytest.raises(AttributeError):
        request.max_tokens = 2
    with pytest.raises(TypeError):
        request.end_id = "2"  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        api.SchedulerConfig().capacity_scheduler_policy = api.CapacitySchedulerPolicy.MAX_UTILIZATION
    with pytest.raises(AttributeError):
        api.KvCacheConfig().max_token = 2
    config = api.ExecutorConfig()
    config.kv_cache_config.max_tokens = 12
    config.note = "dynamic attributes are allowed"
    assert config.kv_cache_config.max_tokens == 12


def test_numpy_values_are_accepted() -> None:
    assert api.LookaheadDecodingConfig(np.array([4]), np.array([3]), np.array([4])).max_window_size == 4
    assert api.KvCacheConfig(max_attention_window=8).max_attention_window == [8]
    defaults = api.RuntimeDefaults(max_attention_window=[5], sink_token_length=2)
    assert api.KvCacheConfig(sink_token_length=1, runtime_defaults=defaults).max_attention_window == [5]
    assert api.KvCacheConfig(sink_token_length=1, runtime_defaults=defaults).sink_token_length == 1
    assert api.DecodingMode.Lookahead() == api.DecodingMode.Lookahead()
    assert (api.PeftCacheConfig().optimal_adapter_size, api.PeftCacheConfig().max_adapter_size) == (8, 64)
    assert api.SamplingConfig(early_stopping=True).early_stopping == True  # noqa: E712 - as in upstream's test


def test_records_can_be_pickled() -> None:
    request = api.Request([1, 2], max_tokens=3, sampling_config=api.SamplingConfig(top_k=4))
    copy = pickle.loads(pickle.dumps(request))
    assert type(copy) is type(request)
    assert (copy.input_token_ids, copy.sampling_config.top_k) == ([1, 2], 4)

"""The interface classes of each release: keywords, defaults, conversions and checks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from trtserve.executor import api
from trtserve.executor.api import for_release
from trtserve.executor.interface.records import in_span
from trtserve.nvidia.releases import RELEASES


def test_release_spans() -> None:
    assert in_span("0.14", "0.14-0.15,1.0-")
    assert not in_span("0.16", "0.14-0.15,1.0-")
    assert in_span("1.2", "0.14-0.15,1.0-")
    assert not in_span("1.2", "")


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_accepts_its_own_triton_models_keywords(release: str) -> None:
    module = for_release(release)
    sampling = module.SamplingConfig(beam_width=1, top_k=2)
    name = "max_tokens" if release.startswith("1.") else "max_new_tokens"
    request = module.Request(input_token_ids=[1, 2], sampling_config=sampling, **{name: 5})
    assert isinstance(request, api.Request)
    assert request.max_tokens == 5
    config = module.ExecutorConfig(kv_cache_config=module.KvCacheConfig(max_tokens=10))
    assert config.kv_cache_config.max_tokens == 10
    assert (config.iter_stats_max_iterations, config.request_stats_max_iterations) == (1000, 0)
    assert module.KvCacheConfig().enable_block_reuse == (RELEASES.index(release) >= RELEASES.index("0.17"))
    assert module.Response(0, module.Result()).result.is_final is False
    assert module.Response(0, "internal error").has_error()


@pytest.mark.parametrize(
    ("release", "name", "keywords"),
    [
        ("1.0", "SamplingConfig", {"random_seed": 1}),
        ("1.0", "SamplingConfig", {"min_length": 1}),
        ("0.12", "SamplingConfig", {"seed": 1}),
        ("0.18", "SamplingConfig", {"min_p": 0.5}),
        ("1.0", "Request", {"input_token_ids": [1], "max_new_tokens": 1}),
        ("0.12", "Request", {"input_token_ids": [1], "max_tokens": 1}),
        ("0.16", "Request", {"input_token_ids": [1], "max_tokens": 1, "num_return_sequences": 1}),
        ("0.14", "KvCacheConfig", {"cross_kv_cache_fraction": 0.5}),
        ("0.13", "ExecutorConfig", {"logits_post_processor_map": {}}),
        ("1.2", "OutputConfig", {"return_everything": True}),
    ],
)
def test_keywords_of_other_releases_are_refused(release: str, name: str, keywords: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        getattr(for_release(release), name)(**keywords)


def test_names_depend_on_the_release() -> None:
    assert not hasattr(for_release("0.12"), "FinishReason")
    assert not hasattr(for_release("0.15"), "GuidedDecodingParams")
    assert for_release("1.2.0rc1").__version__ == "1.2.0"
    with pytest.raises(ValueError, match=r"0\.12"):
        for_release("0.11")


def test_none_for_a_bool_is_false_until_nanobind() -> None:
    assert for_release("0.19").Request([1], max_tokens=1, streaming=None).streaming is False
    with pytest.raises(TypeError, match="streaming"):
        for_release("1.0").Request([1], 1, streaming=None)
    assert for_release("1.0").OutputConfig(return_log_probs=None).return_log_probs is False


def test_positional_arguments() -> None:
    old, middle, new = (for_release(release) for release in ("0.12", "0.13", "1.0"))
    assert old.SamplingConfig(1, 4, 0.5, 0.1, 7, 0.9, 42, 0.8, 3).random_seed == 42
    assert old.SamplingConfig(1, 4, 0.5, 0.1, 7, 0.9, 42, 0.8, 3).min_length == 3
    assert old.Request([1], 9, True).streaming
    for module, arguments in ((middle, ([1], 9)), (new, ([1], 9, True))):
        with pytest.raises(TypeError, match="positional"):
            module.Request(*arguments)
    with pytest.raises(TypeError, match="positional"):
        middle.SamplingConfig(1, 4)
    assert new.Request([1], 9).max_tokens == 9


def test_missing_max_tokens_is_refused() -> None:
    with pytest.raises(RuntimeError, match="missing required argument max_tokens"):
        for_release("0.13").Request([1])
    for release in ("0.12", "1.0"):
        with pytest.raises(TypeError, match="missing required argument"):
            for_release(release).Request([1])
    with pytest.raises(TypeError, match="input_token_ids"):
        for_release("1.0").Request(max_tokens=1)


def test_newer_name_takes_precedence() -> None:
    sampling = for_release("0.19").SamplingConfig(random_seed=1, seed=2, min_length=5)
    assert (sampling.seed, sampling.random_seed, sampling.min_tokens, sampling.min_length) == (2, 2, 5, 5)
    assert for_release("0.19").Request([1], max_tokens=3, max_new_tokens=4).max_new_tokens == 3


BAD_VALUES: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "beam_width 0": (lambda: api.SamplingConfig(0), RuntimeError),
    "beam_width 1025": (lambda: api.SamplingConfig(1025), RuntimeError),
    "top_k": (lambda: api.SamplingConfig(top_k=-1), RuntimeError),
    "top_p 0": (lambda: api.SamplingConfig(top_p=0.0), RuntimeError),
    "top_p above 1": (lambda: api.SamplingConfig(top_p=1.5), RuntimeError),
    "temperature": (lambda: api.SamplingConfig(temperature=-0.1), RuntimeError),
    "repetition": (lambda: api.SamplingConfig(repetition_penalty=0.0), RuntimeError),
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


def test_old_releases_check_sampling_values_later() -> None:
    sampling = for_release("0.12").SamplingConfig(1, 0, 0.0)
    assert sampling.problems() == ["SamplingConfig.top_p is 0.0; it must be greater than 0 and at most 1"]


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
        for_release("0.12").KvCacheConfig().max_tokens = 2
    with pytest.raises(AttributeError):
        api.KvCacheConfig().max_token = 2
    config = api.ExecutorConfig()
    config.kv_cache_config.max_tokens = 12
    config.note = "dynamic attributes are allowed"
    assert config.kv_cache_config.max_tokens == 12


def test_numpy_values_are_accepted() -> None:
    assert api.LookaheadDecodingConfig(np.array([4]), np.array([3]), np.array([4])).max_window_size == 4
    assert for_release("0.12").KvCacheConfig(max_attention_window=8).max_attention_window == [8]
    defaults = api.RuntimeDefaults(max_attention_window=[5], sink_token_length=2)
    assert api.KvCacheConfig(sink_token_length=1, runtime_defaults=defaults).max_attention_window == [5]
    assert api.KvCacheConfig(sink_token_length=1, runtime_defaults=defaults).sink_token_length == 1
    assert api.DecodingMode.Lookahead() == api.DecodingMode.Lookahead()
    assert (api.PeftCacheConfig().optimal_adapter_size, api.PeftCacheConfig().max_adapter_size) == (8, 64)
    assert api.SamplingConfig(early_stopping=True).early_stopping == True  # noqa: E712 - as in upstream's test


@pytest.mark.parametrize("module", [api, for_release("0.16"), for_release("1.2")], ids=["union", "0.16", "1.2"])
def test_records_can_be_pickled(module: Any) -> None:
    request = module.Request([1, 2], max_tokens=3, sampling_config=module.SamplingConfig(top_k=4))
    copy = pickle.loads(pickle.dumps(request))
    assert type(copy) is type(request)
    assert (copy.input_token_ids, copy.sampling_config.top_k) == ([1, 2], 4)

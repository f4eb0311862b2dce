"""Settings that the embedded executor would refuse are refused when the repository is made."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.errors import UsageError
from trtserve.nvidia.releases import RELEASES
from trtserve.repository.engines import require_accepted, require_startable

ENGINE: dict[str, Any] = {
    "pretrained_config": {"vocab_size": 320},
    "build_config": {"max_batch_size": 8, "max_seq_len": 128, "max_num_tokens": 64, "max_beam_width": 1},
}
DEFAULTS = {
    "gpt_model_type": "inflight_fused_batching",
    "gpt_model_path": "tensorrt_llm/1",
    "max_beam_width": "1",
    "enable_chunked_context": "true",
}


def check(settings: dict[str, str], *, release: str = "1.2", queue: int = 0) -> None:
    parameters = {**DEFAULTS, **settings}
    require_startable(parameters, EngineConfig.of(ENGINE), release=release, settings=settings, max_queue_size=queue)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("max_beam_width", "2", "max_beam_width"),
        ("enable_trt_overlap", "true", "since 0.20; leave it out"),
        ("decoding_mode", "medusa", "does not support: the embedded executor has no such decoder"),
        ("decoding_mode", "beam_search", "needs a max_beam_width above 1"),
        (
            "sink_token_length",
            "4",
            "is '4', which this runtime does not support: attention sink tokens are not supported",
        ),
        ("encoder_model_path", "/encoder", "only decoder-only models"),
        ("lookahead_window_size", "4", "lookahead decoding is not supported"),
        ("medusa_choices", "{0}", "trees of draft tokens"),
        ("max_tokens_in_paged_kv_cache", "4000000000", "outside"),
        ("max_tokens_in_paged_kv_cache", "abc", "not a number"),
        ("gpt_model_path", "elsewhere", "neither tensorrt_llm/1 nor"),
    ],
)
def test_refused_by_name(name: str, value: str, reason: str) -> None:
    with pytest.raises(
        UsageError, match=rf"--set {name}={re.escape(value)} cannot start in the embedded executor: .*{reason}"
    ):
        check({"kv_cache_free_gpu_mem_fraction": "0.5", name: value})


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("max_beam_width", "2", ", or set it to 1."),
        ("decoding_mode", "medusa", ", or set it to auto or top_k or top_p or top_k_top_p."),
    ],
)
def test_the_error_names_values_that_would_start(name: str, value: str, accepted: str) -> None:
    with pytest.raises(UsageError) as error:
        check({name: value})
    assert error.value.hint == f"Leave {name} out{accepted}"


@pytest.mark.parametrize(
    ("model", "name"), [("preprocessing", "multimodal_model_path"), ("tensorrt_llm_bls", "multimodal_encoders_name")]
)
def test_other_models_refuse_too(model: str, name: str) -> None:
    require_accepted({model: {name: ""}}, "1.2")
    with pytest.raises(UsageError, match=rf"{model}: Parameter {name} is 'x', .* images are not supported"):
        require_accepted({model: {name: "x"}}, "1.2")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpt_model_type", "V1"),
        ("batch_scheduler_policy", "max_utilization"),
        ("max_attention_window_size", "64"),
        ("enable_kv_cache_reuse", "true"),
        ("guided_decoding_backend", "llguidance"),
        ("sink_token_length", "0"),
        ("lora_prefetch_dir", "/adapters"),
        ("gpu_device_ids", "0,1"),
        ("gpu_device_ids", "0,1;2,3"),
        ("participant_ids", "1,2;3,4"),
        ("xgrammar_tokenizer_info_path", "/of/another/machine.json"),
        ("enable_trt_overlap", "false"),
    ],
)
def test_supported_and_ignored_settings_start(name: str, value: str) -> None:
    check({name: value})


def test_the_queue_is_checked_too() -> None:
    check({}, queue=9)
    with pytest.raises(UsageError, match=r"cannot start with these settings: .* max_queue_size"):
        check({}, queue=2**40)


@pytest.mark.parametrize("release", RELEASES)
def test_defaults_of_every_release_start(release: str) -> None:
    settings = {"kv_cache_free_gpu_mem_fraction": "0.5", "max_attention_window_size": "128", "decoding_mode": "top_k"}
    check({}, release=release)
    check(settings, release=release)

"""What `--set` accepts, and its errors."""

from __future__ import annotations

import re

import pytest

from trtserve.errors import UsageError
from trtserve.repository.profiles import profile
from trtserve.repository.settings import resolve_settings


def test_settings_go_to_their_model() -> None:
    given = {
        "batching_strategy": "v1",
        "tensorrt_llm.decoding_mode": "top_k",
        "tensorrt_llm_bls.accumulate_tokens": "true",
        "preprocessing.add_special_tokens": "false",
        "max_queue_size": "5",
        "logits_datatype": "TYPE_FP16",
    }
    settings = resolve_settings(given, profile())
    assert settings.parameters == {
        "tensorrt_llm": {"gpt_model_type": "v1", "decoding_mode": "top_k"},
        "tensorrt_llm_bls": {"accumulate_tokens": "true"},
        "preprocessing": {"add_special_tokens": "false"},
    }
    assert settings.variables == {"max_queue_size": 5, "logits_datatype": "FP16"}


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("max_tokens_in_paged_kv_cach", "1", "Did you mean max_tokens_in_paged_kv_cache"),
        ("accumulate_tokens", "true", "Did you mean tensorrt_llm_bls.accumulate_tokens?"),
        ("tensorrt_lm.decoding_mode", "top_k", "Did you mean tensorrt_llm"),
        ("decoupled_mode", "true", "--streaming"),
        ("executor", "openvino", "executor_worker_path"),
    ],
)
def test_unknown_keys_are_refused_with_a_suggestion(key: str, value: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve_settings({key: value}, profile())
    assert hint in str(error.value.hint)


@pytest.mark.parametrize(("key", "value"), [("max_queue_size", "-1"), ("logits_datatype", "TYPE_INT8")])
def test_values_of_variables_are_checked(key: str, value: str) -> None:
    with pytest.raises(UsageError, match=key):
        resolve_settings({key: value}, profile())


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max_tokens_in_paged_kv_cache", "abc", "a whole number of 1 or more"),
        ("max_tokens_in_paged_kv_cache", "1_000", "a whole number"),
        ("max_beam_width", "0", "a whole number of 1 or more"),
        ("kv_cache_free_gpu_mem_fraction", "0", r"a number in \(0, 1\]"),
        ("kv_cache_free_gpu_mem_fraction", "nan", "a number in"),
        ("gpu_weights_percent", "1.5", r"a number in \[0, 1\]"),
        ("enable_trt_overlap", "yes", "one of true, false"),
        ("exclude_input_in_output", "tRuE", "one of true, false"),
        ("batch_scheduler_policy", "bogus", "one of guaranteed_no_evict, max_utilization"),
        ("batching_strategy", "inflight", "one of inflight_fused_batching"),
        ("guided_decoding_backend", "outlines", "one of xgrammar, llguidance"),
        ("max_attention_window_size", "64,", "whole numbers of 1 or more, separated"),
        ("gpu_device_ids", "gpu0", "numbers such as"),
        ("medusa_choices", "[[0]]", "a tree such as"),
        ("tensorrt_llm_bls.accumulate_tokens", "on", "one of true, 1, t"),
        ("preprocessing.max_num_images", "-1", "a whole number"),
    ],
)
def test_values_are_read_strictly(key: str, value: str, expected: str) -> None:
    with pytest.raises(UsageError, match=rf"--set {key}={re.escape(value)}: expected {expected}"):
        resolve_settings({key: value}, profile())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_attention_window_size", "64,128"),
        ("kv_cache_free_gpu_mem_fraction", ".5"),
        ("kv_cache_free_gpu_mem_fraction", "5e-1"),
        ("enable_trt_overlap", "TRUE"),
        ("batching_strategy", "V1"),
        ("gpu_device_ids", "0,1;2,3"),
        ("medusa_choices", "{0},{0,1}"),
        ("medusa_choices", "{0, 0, 0}, {0, 1}"),
        ("preprocessing.add_special_tokens", "No"),
        ("max_beam_width", ""),
    ],
)
def test_values_that_the_models_read_are_accepted(key: str, value: str) -> None:
    name = {"batching_strategy": "gpt_model_type"}.get(key, key).rpartition(".")[2]
    (parameters,) = resolve_settings({key: value}, profile()).parameters.values()
    assert parameters == {name: value}


@pytest.mark.parametrize(
    ("key", "value", "before", "since"),
    [
        ("decoding_mode", "eagle", "0.15", "0.16"),
        ("max_attention_window_size", "64,128", "0.12", "0.13"),
        ("guided_decoding_backend", "llguidance", "0.21", "1.0"),
    ],
)
def test_values_follow_the_release(key: str, value: str, before: str, since: str) -> None:
    resolve_settings({key: value}, profile(since))
    with pytest.raises(UsageError, match="expected"):
        resolve_settings({key: value}, profile(before))


def test_required_parameters_cannot_be_empty() -> None:
    with pytest.raises(UsageError, match="but tensorrt_llm needs it"):
        resolve_settings({"batching_strategy": ""}, profile())


def test_unknown_keys_depend_on_the_release() -> None:
    with pytest.raises(UsageError, match=r"release 0\.12"):
        resolve_settings({"cuda_graph_mode": "true"}, profile("0.12"))


def test_a_parameter_of_other_releases_names_them() -> None:
    with pytest.raises(UsageError) as caught:
        resolve_settings({"guided_decoding_backend": "xgrammar"}, profile("0.12"))
    assert caught.value.hint == "Releases that have it: 0.19 – 0.21, 1.0 –."


def test_all_errors_are_reported_at_once() -> None:
    given = {"foo": "1", "max_beam_width": "x", "gpt_model_type": "fast", "exclude_input_in_output": "true"}
    with pytest.raises(UsageError) as caught:
        resolve_settings(given, profile("1.2"), spelled={"gpt_model_type": "--batching-strategy"})
    lines = caught.value.message.splitlines()
    assert lines[0] == "--set foo: tensorrt_llm has no parameter 'foo' in release 1.2."
    assert lines[1].startswith("--set max_beam_width=x: expected ")
    assert lines[2].startswith("--batching-strategy fast: expected ")
    assert len(lines) == 3
    assert str(caught.value.hint).startswith("--set foo: ")

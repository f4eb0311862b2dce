"""`--set`: what it may set, and what it says about what it may not."""

from __future__ import annotations

import pytest

from trtserve.errors import UsageError
from trtserve.triton.profiles import profile
from trtserve.triton.settings import parse_assignments, resolve_settings


def test_assignments() -> None:
    assert parse_assignments(["a=1", "b.c=x=y"]) == {"a": "1", "b.c": "x=y"}
    for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(UsageError):
            parse_assignments(wrong)


def test_places() -> None:
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


def test_release_decides_what_is_known() -> None:
    with pytest.raises(UsageError, match=r"release 0\.12"):
        resolve_settings({"cuda_graph_mode": "true"}, profile("0.12"))

"""Placeholders of NVIDIA's templates in a config.pbtxt: which are harmless."""

from __future__ import annotations

import pytest

from trtserve.repository.config import parameter_texts, parse_config, unfilled_parameters, wrong_placeholders

CORE = """\
name: "tensorrt_llm" # ${a comment}
backend: "tensorrtllm"
max_batch_size: 4
parameters: {
  key: "gpt_model_type"
  value: {
    string_value: "inflight_fused_batching"
  }
}
parameters: {
  key: "gpt_model_path"
  value: {
    string_value: "/engine"
  }
}
parameters: {
  key: "sink_token_length"
  value: {
    string_value: "${sink_token_length}"
  }
}
"""
PREPROCESSING = """\
input [ { name: "QUERY" data_type: TYPE_STRING dims: [ 1 ] } ]
parameters { key: "tokenizer_dir" value: { string_value: "/hf" } }
parameters { key: "gpt_model_path" value { string_value: "${engine_dir}" } }
"""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (CORE, []),
        (CORE.replace("max_batch_size: 4", "max_batch_size: ${size}"), [(3, "${size}")]),
        (CORE.replace('"/engine"', '"${engine_dir}"'), [(13, "${engine_dir}")]),
        (CORE.replace("inflight_fused_batching", "${batching_strategy}"), [(7, "${batching_strategy}")]),
        (CORE.replace('"tensorrtllm"', '"${triton_backend}"'), [(2, "${triton_backend}")]),
        (CORE.replace('"/engine"', '"${root}/engine"'), [(13, "${root}")]),
        (CORE.replace('"${sink_token_length}"', '"${sink_token_length"'), [(19, '${sink_token_length"\n  }')]),
        (PREPROCESSING, []),
        (PREPROCESSING.replace("/hf", "${tokenizer_dir}"), [(2, "${tokenizer_dir}")]),
    ],
)
def test_what_keeps_a_model_from_loading(text: str, wrong: list[tuple[int, str]]) -> None:
    assert list(wrong_placeholders(text)) == wrong


def test_what_is_left_counts_as_unset() -> None:
    config = parse_config(CORE)
    assert parameter_texts(config)["sink_token_length"] == ""
    assert parameter_texts(config)["gpt_model_path"] == "/engine"
    assert unfilled_parameters(config) == ["sink_token_length"]

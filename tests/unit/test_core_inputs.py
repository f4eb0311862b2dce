"""Every input of the core model is used or refused by name; neutral values pass."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from trtserve.programs.core.request import RequestFactory
from trtserve.programs.core.settings import load_executor_module
from trtserve.programs.shared.parameters import check_request_type
from trtserve.repository.profiles import CORE, profile

TYPES = {"INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32, "FP16": np.float16}
TYPES |= {"BOOL": np.bool_, "UINT8": np.uint8, "STRING": np.object_, "$logits": np.float32}
TYPES |= {"$encoder": np.float16, "$prompt": np.float16, "$lora": np.float16}
DECLARED = {tensor.name: tensor for tensor in profile().models[CORE].inputs}
BASE = {"input_ids": [1, 5, 6, 7], "input_lengths": 3, "request_output_len": 9}

# Input → a value that asks for something, and what the request then says.
CARRIED: dict[str, tuple[Any, Callable[[Any], Any], Any]] = {
    "input_ids": ([4, 3, 2], lambda request: request.input_token_ids, [4, 3, 2]),
    "input_lengths": (2, lambda request: request.input_token_ids, [1, 5]),
    "request_output_len": (5, lambda request: request.max_tokens, 5),
    "streaming": (True, lambda request: request.streaming, True),
    "end_id": (4, lambda request: request.end_id, 4),
    "pad_id": (4, lambda request: request.pad_id, 4),
    "stop_words_list": ([[5, 6], [1, 2]], lambda request: request.stop_words, [[5], [6]]),
    "bad_words_list": ([[5, 6, 7], [1, 3, -1]], lambda request: request.bad_words, [[5], [6, 7]]),
    "embedding_bias": ([0.5, -0.5], lambda request: request.embedding_bias.tolist(), [0.5, -0.5]),
    "runtime_top_k": (3, lambda request: request.sampling_config.top_k, 3),
    "runtime_top_p": (0.5, lambda request: request.sampling_config.top_p, 0.5),
    "runtime_top_p_min": (0.5, lambda request: request.sampling_config.top_p_min, 0.5),
    "runtime_top_p_decay": (0.5, lambda request: request.sampling_config.top_p_decay, 0.5),
    "min_p": (0.25, lambda request: request.sampling_config.min_p, 0.25),
    "runtime_top_p_reset_ids": (7, lambda request: request.sampling_config.top_p_reset_ids, 7),
    "temperature": (0.5, lambda request: request.sampling_config.temperature, 0.5),
    "repetition_penalty": (1.5, lambda request: request.sampling_config.repetition_penalty, 1.5),
    "presence_penalty": (0.5, lambda request: request.sampling_config.presence_penalty, 0.5),
    "frequency_penalty": (0.5, lambda request: request.sampling_config.frequency_penalty, 0.5),
    "beam_width": (2, lambda request: request.sampling_config.beam_width, 2),
    "num_return_sequences": (2, lambda request: request.sampling_config.num_return_sequences, 2),
    "len_penalty": (2.0, lambda request: request.sampling_config.length_penalty, 2.0),
    "early_stopping": (True, lambda request: request.sampling_config.early_stopping, 1),
    "beam_search_diversity_rate": (0.5, lambda request: request.sampling_config.beam_search_diversity_rate, 0.5),
    "min_length": (2, lambda request: request.sampling_config.min_tokens, 2),
    "min_tokens": (2, lambda request: request.sampling_config.min_tokens, 2),
    "random_seed": (7, lambda request: request.sampling_config.seed, 7),
    "seed": (7, lambda request: request.sampling_config.seed, 7),
    "exclude_input_in_output": (True, lambda request: request.output_config.exclude_input_from_output, True),
    "return_log_probs": (True, lambda request: request.output_config.return_log_probs, True),
    "return_context_logits": (True, lambda request: request.output_config.return_context_logits, True),
    "return_generation_logits": (True, lambda request: request.output_config.return_generation_logits, True),
    "return_perf_metrics": (True, lambda request: request.output_config.return_perf_metrics, True),
    "return_kv_cache_reuse_stats": (True, lambda request: request.output_config.return_perf_metrics, True),
    "draft_input_ids": ([3, 4], lambda request: request.external_draft_tokens_config.tokens, [3, 4]),
    "prompt_embedding_table": (
        [[0.5, 1.5]],
        lambda request: request.prompt_tuning_config.embedding_table.tolist(),
        [[0.5, 1.5]],
    ),
    "lora_task_id": (2**63, lambda request: request.lora_config.task_id, 2**63),
    "retention_decode_priority": (
        50,
        lambda request: request.kv_cache_retention_config.decode_retention_priority,
        50,
    ),
    "retention_decode_duration_ms": (
        50,
        lambda request: request.kv_cache_retention_config.decode_duration_ms,
        timedelta(milliseconds=50),
    ),
    "encoder_input_features": ([[0.5]], lambda request: request.encoder_input_features.tolist(), [[0.5]]),
    "images": ([b"a file"], lambda request: list(request.images), [b"a file"]),
    "skip_cross_attn_blocks": (True, lambda request: request.skip_cross_attn_blocks.tolist(), [True]),
}
# Input → a value that asks for something, and what the error says when nothing else is given.
REFUSED: dict[str, tuple[Any, str]] = {
    "draft_logits": ([[0.5]], "draft_logits needs draft_input_ids"),
    "draft_acceptance_threshold": (0.5, "draft_acceptance_threshold needs draft_input_ids"),
    "decoder_input_ids": ([3, 4], "decoder_input_ids"),
    "encoder_output_lengths": (3, "encoder_output_lengths needs encoder_input_features"),
    "cross_attention_mask": ([[True]], "cross_attention_mask needs encoder_input_features"),
    "prompt_table_extra_ids": ([3], "prompt_table_extra_ids needs prompt_embedding_table"),
    "mrope_rotary_cos_sin": ([0.5], "mrope_position_deltas is required"),
    "mrope_position_deltas": (3, "mrope_position_deltas needs mrope_rotary_cos_sin"),
    "lora_weights": ([[0.5]], "lora_weights needs lora_task_id"),
    "lora_config": ([[1, 0, 8]], "lora_config needs lora_task_id"),
    "context_phase_params": ([1, 2], "context_phase_params is not supported"),
    "retention_token_range_starts": ([0], "retention_token_range_starts"),
    "retention_token_range_ends": ([4], "retention_token_range_starts, _ends"),
    "retention_token_range_priorities": ([50], "retention_token_range_starts, _ends and _priorities"),
    "retention_token_range_durations_ms": ([50], "retention_token_range_starts.* _durations_ms"),
    "guided_decoding_guide_type": (b"regex", "guide"),
    "num_top_log_probs": (2, "num_top_log_probs needs return_log_probs, and the vllm runtime"),
    "return_prompt_log_probs": (True, "return_prompt_log_probs needs return_log_probs, and the vllm runtime"),
    "guided_decoding_guide": (b"a+", "guided_decoding_guide needs guided_decoding_guide_type"),
    "lookahead_window_size": (4, "lookahead_ngram_size is required"),
    "lookahead_ngram_size": (4, "lookahead_window_size is required"),
    "lookahead_verification_set_size": (4, "lookahead_window_size is required"),
}
# What the model itself reads from the batch, and what TensorRT-LLM ignores too.
ELSEWHERE = {
    "stop": False,
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "prompt_vocab_size": 3,
    "decoder_input_lengths": 1,
}
# Inputs for which 0, False and "" ask for something, and the values by which they ask for nothing.
NEUTRAL = {
    "repetition_penalty": 1.0,
    "runtime_top_p_decay": 1.0,
    "temperature": 1.0,
    "stop_words_list": [[0], [-1]],
    "bad_words_list": [[0], [-1]],
    "retention_decode_priority": 35,
    "retention_decode_duration_ms": -1,
}
NEVER_NEUTRAL = {*BASE, "lora_task_id"}
EMPTY_IS_NEUTRAL = [
    name for name, tensor in DECLARED.items() if -1 in tensor.dims and name not in NEVER_NEUTRAL and name not in NEUTRAL
]


def tensor(name: str, value: Any) -> Any:
    """One batch row as Triton hands it on: [1] for what is declared with `reshape { }`."""
    declared = DECLARED[name]
    array = np.array([value], dtype=TYPES[declared.type])
    return (
        array if declared.scalar else array.reshape(1, *(declared.dims if declared.dims == (1,) else array.shape[1:]))
    )


def built(values: dict[str, Any], release: str = "1.2") -> Any:
    """The executor request of the inputs."""
    executor = load_executor_module("openvino", release)
    inputs = {name: tensor(name, value) for name, value in {**BASE, **values}.items()}
    (request,) = RequestFactory(executor, decoupled=True, exclude_input=False).requests(inputs)
    return request


def test_every_declared_input_is_tested() -> None:
    assert sorted([*CARRIED, *REFUSED, *ELSEWHERE]) == sorted(DECLARED)


@pytest.mark.parametrize("name", CARRIED)
def test_inputs_reach_the_executor(name: str) -> None:
    value, read, expected = CARRIED[name]
    assert read(built({name: value})) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=message):
        built({name: value})


@pytest.mark.parametrize("name", sorted(DECLARED.keys() - NEVER_NEUTRAL))
def test_neutral_values_are_accepted(name: str) -> None:
    declared = DECLARED[name]
    zero: Any = b"" if declared.type == "STRING" else 0
    empty = np.zeros([max(0, size) for size in declared.dims]).tolist()
    value: Any = NEUTRAL.get(name, ELSEWHERE.get(name, empty if name in EMPTY_IS_NEUTRAL else zero))
    assert built({name: value}).max_tokens == BASE["request_output_len"]


def test_the_pad_id_as_decoder_input_is_accepted() -> None:
    request = built({"pad_id": 2, "decoder_input_ids": [2], "decoder_input_lengths": 1})
    assert request.pad_id == 2


GROUPS: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Any]] = {
    "adapter": (
        {"lora_task_id": 1, "lora_weights": [[0.5]], "lora_config": [[1, 0, 8]]},
        lambda request: (request.lora_config.weights.tolist(), request.lora_config.config.tolist()),
        ([[0.5]], [[1, 0, 8]]),
    ),
    "drafts": (
        {"draft_input_ids": [3], "draft_logits": [[1.0]], "draft_acceptance_threshold": 0.5},
        lambda request: [
            getattr(request.external_draft_tokens_config, name) for name in ("tokens", "logits", "acceptance_threshold")
        ],
        [[3], [[1.0]], 0.5],
    ),
    "table": (
        {"prompt_embedding_table": [[0.5]], "prompt_table_extra_ids": [1, 2, 3, 4]},
        lambda request: request.prompt_tuning_config.input_token_extra_ids,
        [1, 2, 3],
    ),
    "mrope": (
        {"mrope_rotary_cos_sin": [0.5], "mrope_position_deltas": 3},
        lambda request: request.mrope_config.mrope_position_deltas,
        3,
    ),
    "guide": (
        {"guided_decoding_guide_type": b"regex", "guided_decoding_guide": b"a+"},
        lambda request: (request.guided_decoding_params.guide_type.name, request.guided_decoding_params.guide),
        ("REGEX", "a+"),
    ),
    "a guide of nothing": (
        {"guided_decoding_guide_type": b"json"},
        lambda request: (request.guided_decoding_params.guide_type.name, request.guided_decoding_params.guide),
        ("JSON", None),
    ),
    "lookahead": (
        {"lookahead_window_size": 4, "lookahead_ngram_size": 3, "lookahead_verification_set_size": 5},
        lambda request: request.lookahead_config.max_verification_set_size,
        5,
    ),
    "retention": (
        {
            "retention_token_range_starts": [0],
            "retention_token_range_ends": [-1],
            "retention_token_range_priorities": [50],
            "retention_token_range_durations_ms": [20],
        },
        lambda request: [
            (each.token_start, each.token_end, each.priority, each.duration_ms)
            for each in request.kv_cache_retention_config.token_range_retention_configs
        ],
        [(0, None, 50, timedelta(milliseconds=20))],
    ),
}


@pytest.mark.parametrize("group", GROUPS)
def test_groups_of_inputs_reach_the_executor(group: str) -> None:
    values, read, expected = GROUPS[group]
    assert read(built(values)) == expected


def test_an_adapter_without_a_task_id_is_refused() -> None:
    with pytest.raises(RuntimeError, match="LoRA weights and config"):
        built({"lora_task_id": 1, "lora_config": [[1, 0, 8]]})


def test_inputs_of_later_releases_are_refused() -> None:
    built({"return_perf_metrics": False}, "0.15")
    with pytest.raises(ValueError, match="return_perf_metrics is not supported"):
        built({"return_perf_metrics": True}, "0.15")


@pytest.mark.parametrize("parameters", ["", "{}", '{"request_type": "context_and_generation"}', '{"priority": 3}'])
def test_usual_request_types_pass(parameters: str) -> None:
    check_request_type(parameters)


@pytest.mark.parametrize("asked", ["context_only", "generation_only", "both"])
def test_requests_of_disaggregated_serving_are_refused(asked: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"request_type is '{asked}'")):
        check_request_type(f'{{"request_type": "{asked}"}}')

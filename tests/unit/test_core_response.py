"""Executor results become outputs with the names, shapes and types of NVIDIA's backend."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from trtserve.executor.engine.requests import FinishReason
from trtserve.executor.interface.results import RequestPerfMetrics, Result
from trtserve.programs.core import response as core
from trtserve.programs.core.settings import ExecutorModule


def arrays(result: Result, **wanted: Any) -> dict[str, Any]:
    """Output name → array of a result to a prompt of four tokens."""
    module = ExecutorModule(None, (1, 2))
    found: dict[str, Any] = core.output_arrays(module, result, core.Wanted(prompt_length=4, **wanted))
    return found


def test_beams_are_padded() -> None:
    result = Result(output_token_ids=[[5, 6, 7], [8]], cum_log_probs=[-1, -2], log_probs=[[-0.5, -0.5], [-2.0]])
    found = arrays(result)
    assert found["output_ids"].tolist() == [[[5, 6, 7], [8, -1, -1]]]
    assert found["sequence_length"].tolist() == [[3, 1]]
    assert found["cum_log_probs"].tolist() == [[-1, -2]]
    assert found["output_log_probs"].tolist() == [[[-0.5, -0.5], [-2.0, -1.0]]]
    types = {name: array.dtype.name for name, array in found.items()}
    assert types == {
        "output_ids": "int32",
        "sequence_length": "int32",
        "cum_log_probs": "float32",
        "output_log_probs": "float32",
    }


def test_a_response_without_tokens() -> None:
    found = arrays(Result(output_token_ids=[[]]))
    assert found["output_ids"].shape == (1, 1, 0)
    assert found["sequence_length"].tolist() == [[0]]


@pytest.mark.parametrize("logits", [np.float16, np.float32])
@pytest.mark.parametrize("made", [np.float16, np.float32])
def test_logits_have_the_declared_type(logits: Any, made: Any) -> None:
    context, generation = np.ones((4, 9), dtype=made), np.ones((2, 5, 9), dtype=made)
    found = arrays(Result(output_token_ids=[[1]], context_logits=context, generation_logits=generation), logits=logits)
    assert found["context_logits"].shape == (1, 4, 9)
    assert found["generation_logits"].shape == (1, 2, 5, 9)
    assert {found["context_logits"].dtype, found["generation_logits"].dtype} == {np.dtype(logits)}


def test_indexes_are_sent_only_for_several_rows_or_sequences() -> None:
    result = Result(output_token_ids=[[1]], sequence_index=2)
    assert set(arrays(result)) == {"output_ids", "sequence_length"}
    found = arrays(result, batch_index=1, numbered=True)
    assert found["batch_index"].tolist() == [[1]]
    assert found["sequence_index"].tolist() == [[2]]


def test_counts_of_tokens() -> None:
    found = arrays(Result(output_token_ids=[[1] * 9]), count_input=True, count_output=True, output_prompt_length=4)
    assert found["num_input_tokens"].tolist() == [[4]]
    assert found["num_output_tokens"].tolist() == [[5]]


def test_performance() -> None:
    metrics = RequestPerfMetrics()
    metrics.timing_metrics.first_token_time = timedelta(days=3, microseconds=7)
    metrics.kv_cache_metrics.num_reused_blocks = 3
    metrics.speculative_decoding.acceptance_rate = 0.25
    found = arrays(Result(output_token_ids=[[1]], request_perf_metrics=metrics))
    assert found["first_token_time_ns"].tolist() == [[3 * 86_400 * 10**9 + 7_000]]
    assert found["first_token_time_ns"].dtype == np.int64
    assert found["kv_cache_reused_blocks"].tolist() == [[3]]
    assert found["acceptance_rate"].tolist() == [[0.25]]
    assert len(found) == 2 + 3 + 4 + 3


def test_finish_reason_comes_with_the_end_and_on_demand() -> None:
    running = Result(output_token_ids=[[1], [2]], finish_reasons=[FinishReason.NOT_FINISHED] * 2)
    ended = Result(output_token_ids=[[1], [2]], finish_reasons=[FinishReason.END_ID, FinishReason.STOP_WORDS])
    assert "finish_reason" not in arrays(ended)
    assert "finish_reason" not in arrays(running, finish_reason=True)
    assert arrays(ended, finish_reason=True)["finish_reason"].tolist() == [[b"end_id", b"stop_words"]]


@pytest.mark.parametrize(
    ("reasons", "generated", "expected"),
    [
        ([FinishReason.NOT_FINISHED], 3, {}),
        ([], 3, {}),
        ([FinishReason.LENGTH], 8, {"finish_reason": "length"}),
        ([FinishReason.LENGTH], 3, {"finish_reason": "length", "max_tokens": 3}),
        ([FinishReason.LENGTH] * 2, 6, {"finish_reason": "length,length", "max_tokens": 3}),
        ([FinishReason.END_ID], 3, {"finish_reason": "end_id"}),
        ([FinishReason.CANCELLED], 3, {"finish_reason": "cancelled"}),
    ],
)
def test_response_parameters(reasons: list[FinishReason], generated: int, expected: dict[str, Any]) -> None:
    wanted = core.Wanted(prompt_length=4, max_tokens=8)
    assert core.response_parameters(Result(finish_reasons=reasons), wanted, generated) == expected


def test_old_releases_send_zeros_for_outputs_that_were_not_requested() -> None:
    wanted = core.Wanted(prompt_length=4)
    found = core.zero_filled(arrays(Result(output_token_ids=[[1]], cum_log_probs=[-3.0])), wanted)
    assert found["cum_log_probs"].tolist() == [[-3.0]]
    assert found["output_log_probs"].tolist() == [[[0.0] * 4]]
    assert found["context_logits"].shape == (1, 1, 1)
    assert found["generation_logits"].shape == (1, 1, 1, 1)


def test_old_releases_send_their_outputs_in_nvidias_order() -> None:
    """Its benchmark reads the number of tokens from the first output."""
    result = Result(output_token_ids=[[1]], cum_log_probs=[-3.0])
    found = core.zero_filled(arrays(result, batch_index=0), core.Wanted(prompt_length=4))
    assert list(found) == [
        "output_ids",
        "sequence_length",
        "cum_log_probs",
        "output_log_probs",
        "context_logits",
        "generation_logits",
        "batch_index",
    ]

"""Convert an output of the LLM API to arrays of the types in config.pbtxt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared.durations import nanoseconds

Outputs = dict[str, NDArray[Any]]

# Output → field of the KV cache's metrics.
_CACHE = {
    "kv_cache_reused_block": "num_reused_blocks",
    "kv_cache_missed_block": "num_missed_blocks",
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
}
_TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")


def output_arrays(output: Any, wanted: Collection[str]) -> Outputs:
    """Return output name → array without a batch axis; `output` is a `RequestOutput` with the text so far."""
    sequences = output.outputs
    arrays: Outputs = {"text_output": _texts([sequence.text for sequence in sequences])}
    if "return_finish_reason" in wanted:
        arrays["finish_reason"] = _texts([str(sequence.finish_reason) for sequence in sequences])
    if "return_stop_reason" in wanted:
        arrays["stop_reason"] = _texts([str(sequence.stop_reason) for sequence in sequences])
    if "return_cumulative_logprob" in wanted:
        # The LLM returns None when it has no number; NumPy makes it NaN.
        arrays["cumulative_logprob"] = np.array([each.cumulative_logprob for each in sequences], dtype=np.float32)
    if "return_num_input_tokens" in wanted:
        arrays["num_input_tokens"] = np.array([len(output.prompt_token_ids)], dtype=np.int32)
    if "return_num_output_tokens" in wanted:
        arrays["num_output_tokens"] = np.array([sum(len(each.token_ids) for each in sequences)], dtype=np.int32)
    if (metrics := getattr(sequences[0], "request_perf_metrics", None)) is not None:
        arrays.update(_performance(metrics))
    return arrays


def _texts(values: Sequence[str]) -> NDArray[Any]:
    return np.array([value.encode("utf-8") for value in values], dtype=np.object_)


def _performance(metrics: Any) -> Outputs:
    cache, timing = metrics.kv_cache_metrics, metrics.timing_metrics
    arrays: Outputs = {name: np.array([getattr(cache, key)], dtype=np.int32) for name, key in _CACHE.items()}
    arrays["kv_cache_hit_rate"] = np.array([cache.kv_cache_hit_rate], dtype=np.float32)
    for name in _TIMES:
        arrays[f"{name}_ns"] = np.array([nanoseconds(getattr(timing, name))], dtype=np.int64)
    if (draft := getattr(metrics, "speculative_decoding", None)) is not None:
        arrays["acceptance_rate"] = np.array([draft.acceptance_rate], dtype=np.float32)
        arrays["total_accepted_draft_tokens"] = np.array([draft.total_accepted_draft_tokens], dtype=np.int32)
        arrays["total_draft_tokens"] = np.array([draft.total_draft_tokens], dtype=np.int32)
    return arrays

"""How executor results become output arrays, with the shapes of TensorRT-LLM's Triton backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from executor_module import ExecutorModule
from numpy.typing import NDArray

Outputs = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Wanted:
    """What the outputs of one Triton request depend on, beside the result.

    `batch_index` is None when the request has one row, `numbered` when the answers tell their sequence;
    `output_prompt_length` counts the prompt tokens in front of each non-streamed result; `max_tokens` is what the
    request asked for, `repeats` means that each result holds all tokens so far (streamed beams), and `logits` is the
    type that config.pbtxt declares for them.
    """

    prompt_length: int
    output_prompt_length: int = 0
    max_tokens: int = 0
    repeats: bool = False
    logits: Any = np.float32
    finish_reason: bool = False
    batch_index: int | None = None
    numbered: bool = False
    count_input: bool = False
    count_output: bool = False


def output_arrays(module: ExecutorModule, result: Any, wanted: Wanted) -> Outputs:
    """Output name → array with a leading batch axis of 1."""
    outputs = _tokens(result.output_token_ids)
    if result.cum_log_probs is not None:
        outputs["cum_log_probs"] = np.asarray([result.cum_log_probs], dtype=np.float32)
    if result.log_probs is not None:
        outputs["output_log_probs"] = _padded(result.log_probs, np.float32)
    if result.context_logits is not None:
        outputs["context_logits"] = _logits(module, result.context_logits, wanted)
    if result.generation_logits is not None:
        outputs["generation_logits"] = _logits(module, result.generation_logits, wanted)
    if wanted.batch_index is not None:
        outputs["batch_index"] = _number(wanted.batch_index)
    if wanted.numbered:
        outputs["sequence_index"] = _number(result.sequence_index)
    if wanted.finish_reason and (words := finish_words(result)):
        outputs["finish_reason"] = np.array([[word.encode() for word in words]], dtype=np.object_)
    _add_counts(outputs, result, wanted)
    if getattr(result, "request_perf_metrics", None) is not None:
        outputs.update(_performance(result.request_perf_metrics))
    return outputs


def zero_filled(outputs: Outputs, wanted: Wanted) -> Outputs:
    """What releases before 0.14 sent: zeros for outputs that nobody asked for, and always the batch index."""
    zeros = {
        "cum_log_probs": (1, 1),
        "output_log_probs": (1, 1, wanted.prompt_length),
        "context_logits": (1, 1, 1),
        "generation_logits": (1, 1, 1, 1),
    }
    filled: Outputs = {name: np.zeros(shape, dtype=np.float32) for name, shape in zeros.items()}
    filled["batch_index"] = _number(wanted.batch_index or 0)
    return {**filled, **outputs}


def _tokens(beams: list[list[int]]) -> Outputs:
    if len(beams) == 1:  # the path of every streamed token
        ids = beams[0]
        return {
            "output_ids": np.array(ids, dtype=np.int32).reshape(1, 1, len(ids)),
            "sequence_length": np.array([[len(ids)]], dtype=np.int32),
        }
    lengths = [len(ids) for ids in beams]
    return {"output_ids": _padded(beams, np.int32), "sequence_length": np.array([lengths], dtype=np.int32)}


def _padded(rows: list[list[Any]], dtype: Any) -> NDArray[Any]:
    """[1, rows, longest], padded with -1."""
    result = np.full((1, len(rows), max(map(len, rows), default=0)), -1, dtype=dtype)
    for index, row in enumerate(rows):
        result[0, index, : len(row)] = row
    return result


def _logits(module: ExecutorModule, tensor: Any, wanted: Wanted) -> NDArray[Any]:
    """[1, …] of the declared type: Triton takes a tensor of any other type for what it is not."""
    return module.as_array(tensor)[np.newaxis].astype(wanted.logits, copy=False)


def finish_words(result: Any) -> list[str]:
    """Why each beam ended, in lower case; [] while it goes on, and before release 0.13."""
    words = [reason.name.lower() for reason in getattr(result, "finish_reasons", ())]
    return [] if all(word == "not_finished" for word in words) else words


def response_parameters(result: Any, wanted: Wanted, generated: int) -> dict[str, Any]:
    """What no tensor of the releases tells: why the sequence ended, and a `max_tokens` that the executor reduced."""
    words = finish_words(result)
    if not words:
        return {}
    parameters: dict[str, Any] = {"finish_reason": ",".join(words)}
    if set(words) == {"length"} and generated < wanted.max_tokens * len(words):
        parameters["max_tokens"] = generated // len(words)
    return parameters


def _number(value: int, dtype: Any = np.int32) -> NDArray[Any]:
    return np.array([[value]], dtype=dtype)


def generated_tokens(result: Any, wanted: Wanted) -> int:
    """New tokens in the result, over its beams."""
    beams = result.output_token_ids
    return max(0, sum(map(len, beams)) - wanted.output_prompt_length * len(beams))


def _add_counts(outputs: Outputs, result: Any, wanted: Wanted) -> None:
    if wanted.count_input:
        outputs["num_input_tokens"] = _number(wanted.prompt_length)
    if wanted.count_output:
        outputs["num_output_tokens"] = _number(generated_tokens(result, wanted))


def _performance(metrics: Any) -> Outputs:
    cache, timing = metrics.kv_cache_metrics, metrics.timing_metrics
    outputs = {
        "kv_cache_alloc_new_blocks": _number(cache.num_new_allocated_blocks),
        "kv_cache_reused_blocks": _number(cache.num_reused_blocks),
        "kv_cache_alloc_total_blocks": _number(cache.num_total_allocated_blocks),
    }
    for name in ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time"):
        outputs[f"{name}_ns"] = _number(_nanoseconds(getattr(timing, name)), np.int64)
    draft = getattr(metrics, "speculative_decoding", None)
    if draft is not None:
        outputs["acceptance_rate"] = np.array([[draft.acceptance_rate]], dtype=np.float32)
        outputs["total_accepted_draft_tokens"] = _number(draft.total_accepted_draft_tokens)
        outputs["total_draft_tokens"] = _number(draft.total_draft_tokens)
    return outputs


def _nanoseconds(duration: Any) -> int:
    """Exact where `total_seconds()` would round."""
    return int(((duration.days * 86_400 + duration.seconds) * 1_000_000 + duration.microseconds) * 1_000)

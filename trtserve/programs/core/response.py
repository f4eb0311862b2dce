"""Convert executor results to output arrays with the shapes of TensorRT-LLM's Triton backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared.arrays import performance
from .settings import ExecutorModule

Outputs = dict[str, NDArray[Any]]

# Output → count of the KV cache.
_BLOCKS = {
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_reused_blocks": "num_reused_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
}


@dataclass(frozen=True)
class Wanted:
    """What the outputs of one batch row depend on, besides the executor's result."""

    prompt_length: int
    output_prompt_length: int = 0
    """Prompt tokens at the beginning of each result, or 0 for streams and where the prompt is left out."""
    max_tokens: int = 0  # the limit that the request asked for
    repeats: bool = False  # whether each result holds all tokens so far (streamed beams)
    logits: Any = np.float32  # NumPy type of the logits outputs in config.pbtxt
    streamed: bool = False
    finish_reason: bool = False
    batch_index: int | None = None  # index of the row, or None when the request has one row
    numbered: bool = False  # whether responses have a sequence_index
    count_input: bool = False
    count_output: bool = False


def _add_named(outputs: Outputs, result: Any) -> None:
    """Add log-probabilities that only the vllm runtime has: with the ids of their tokens, and of the prompt."""
    named = {"top_log_probs": getattr(result, "top_log_probs", None)}
    if getattr(result, "prompt_log_probs", None) is not None:
        values, named["prompt_top_log_probs"] = result.prompt_log_probs
        outputs["prompt_log_probs"] = np.asarray([values], dtype=np.float32)
    for name, rows in named.items():
        if rows is not None:
            outputs[f"{name}_ids"] = _padded([[token for token, _ in row] for row in rows], np.int32)
            outputs[name] = _padded([[value for _, value in row] for row in rows], np.float32)


def output_arrays(module: ExecutorModule, result: Any, wanted: Wanted, earlier: Sequence[int] = ()) -> Outputs:
    """Return output name → array with a leading batch axis of 1; tokens `earlier` in the stream come first."""
    beams = result.output_token_ids
    outputs = _tokens([[*earlier, *beams[0]]] if earlier else beams)
    if result.cum_log_probs is not None:
        outputs["cum_log_probs"] = np.asarray([result.cum_log_probs], dtype=np.float32)
    if result.log_probs is not None:
        outputs["output_log_probs"] = _padded(result.log_probs, np.float32)
    _add_named(outputs, result)
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
    _add_counts(outputs, result, wanted, earlier)
    if getattr(result, "request_perf_metrics", None) is not None:
        numbers = performance(result.request_perf_metrics, _BLOCKS)
        outputs.update({name: number.reshape(1, 1) for name, number in numbers.items()})
    return outputs


def zero_filled(outputs: Outputs, wanted: Wanted) -> Outputs:
    """Add what releases before 0.14 sent: zeros for outputs that were not requested.

    The order is that of NVIDIA's backend: its clients read the first output, whatever its name.
    """
    zeros = {
        "cum_log_probs": (1, 1),
        "output_log_probs": (1, 1, wanted.prompt_length),
        "context_logits": (1, 1, 1),
        "generation_logits": (1, 1, 1, 1),
    }
    filled: Outputs = {name: np.zeros(shape, dtype=np.float32) for name, shape in zeros.items()}
    tokens = {name: outputs[name] for name in ("output_ids", "sequence_length")}
    return tokens | filled | outputs


def _tokens(beams: list[list[int]]) -> Outputs:
    if len(beams) == 1:  # the path of every streamed token
        return {"output_ids": np.array([beams], dtype=np.int32), "sequence_length": _number(len(beams[0]))}
    lengths = [len(ids) for ids in beams]
    return {"output_ids": _padded(beams, np.int32), "sequence_length": np.array([lengths], dtype=np.int32)}


def _padded(rows: list[list[Any]], dtype: Any) -> NDArray[Any]:
    """Return [1, rows, longest row], padded with -1."""
    result = np.full((1, len(rows), max(map(len, rows), default=0)), -1, dtype=dtype)
    for index, row in enumerate(rows):
        result[0, index, : len(row)] = row
    return result


def _logits(module: ExecutorModule, tensor: Any, wanted: Wanted) -> NDArray[Any]:
    """Return [1, …] of the declared type; Triton would misread a tensor of another type."""
    return module.as_array(tensor)[np.newaxis].astype(wanted.logits, copy=False)


def finish_words(result: Any) -> list[str]:
    """Return why each beam ended, in lower case, or [] while it runs, and before release 0.13."""
    names = [reason.name for reason in getattr(result, "finish_reasons", ())]
    return [] if set(names) <= {"NOT_FINISHED"} else [name.lower() for name in names]


def response_parameters(result: Any, wanted: Wanted, generated: int) -> dict[str, Any]:
    """Return what no release has a tensor for: the finish reason, and `max_tokens` if the executor reduced it."""
    words = finish_words(result)
    if not words:
        return {}
    parameters: dict[str, Any] = {"finish_reason": ",".join(words)}
    if set(words) == {"length"} and generated < wanted.max_tokens * len(words):
        parameters["max_tokens"] = generated // len(words)
    return parameters


def _number(value: int) -> NDArray[Any]:
    return np.array([[value]], dtype=np.int32)


def generated_tokens(result: Any, wanted: Wanted) -> int:
    """Return the number of new tokens in the result, over all beams."""
    beams = result.output_token_ids
    return max(0, sum(map(len, beams)) - wanted.output_prompt_length * len(beams))


def _add_counts(outputs: Outputs, result: Any, wanted: Wanted, earlier: Sequence[int]) -> None:
    if wanted.count_input:
        outputs["num_input_tokens"] = _number(getattr(result, "prompt_tokens", None) or wanted.prompt_length)
    if wanted.count_output:
        outputs["num_output_tokens"] = _number(generated_tokens(result, wanted) + len(earlier))

"""Requests to the LLM API: their tensors become keywords of `SamplingParams`, its outputs become arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared.arrays import MOST_BYTES, decoded, performance, words_of

Inputs = Mapping[str, NDArray[Any]]

_PREFIX = "sampling_param_"
# These have several elements.
_WORDS = ("stop", "bad")
_WANTED = (
    "return_finish_reason",
    "return_stop_reason",
    "return_cumulative_logprob",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
_LORA = ("lora_id", "lora_name", "lora_path")


@dataclass(frozen=True)
class LlmRequest:
    """One prompt for the LLM."""

    prompt: str
    streaming: bool
    sampling: dict[str, Any]
    """Keywords of SamplingParams."""
    lora: dict[str, Any] = field(default_factory=dict)
    """Keywords of LoRARequest, or empty without an adapter."""
    wanted: frozenset[str] = frozenset()
    """The `return_…` inputs that are true."""


def read_request(inputs: Inputs, *, decoupled: bool) -> LlmRequest:
    """Read the inputs of one request. Raises ValueError for wrong ones."""
    text = inputs.get("text_input")
    if text is None or text.size != 1:
        raise ValueError(f"text_input has {0 if text is None else text.size} prompts; this model takes one.")
    streaming = bool(_scalar(inputs, "streaming") or False)
    if streaming and not decoupled:
        raise ValueError("Streaming is only supported in decoupled mode.")
    return LlmRequest(
        prompt=_text(text.reshape(-1)[0], "text_input"),
        streaming=streaming,
        sampling=_sampling(inputs),
        lora=_lora(inputs),
        wanted=frozenset(name for name in _WANTED if _scalar(inputs, name)),
    )


def _sampling(inputs: Inputs) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    for name, value in inputs.items():
        keyword = name.removeprefix(_PREFIX)
        if keyword == name:
            continue
        if keyword in _WORDS:
            keywords[keyword] = [word for word in words_of(value, name) if word] or None
        else:
            keywords[keyword] = _scalar(inputs, name)
    keywords.setdefault("exclude_input_from_output", False)
    return {keyword: value for keyword, value in keywords.items() if value is not None}


def _lora(inputs: Inputs) -> dict[str, Any]:
    given = [name for name in _LORA if name in inputs]
    if not given:
        return {}
    if len(given) < len(_LORA):
        raise ValueError(f"{' and '.join(given)} given alone; lora_id, lora_name and lora_path must be given together.")
    source = _text(inputs["lora_ckpt_source"].item(), "lora_ckpt_source") if "lora_ckpt_source" in inputs else "hf"
    if source not in ("hf", "nemo"):
        raise ValueError(f"lora_ckpt_source is {source!r}; expected hf or nemo.")
    return {
        "lora_int_id": int(inputs["lora_id"].item()),
        "lora_name": _text(inputs["lora_name"].item(), "lora_name"),
        "lora_path": _text(inputs["lora_path"].item(), "lora_path"),
        "lora_ckpt_source": source,
    }


def _scalar(inputs: Inputs, name: str) -> Any:
    """Return the only element as a Python object, or None when the tensor is absent."""
    value = inputs.get(name)
    if value is None:
        return None
    if value.size != 1:
        raise ValueError(f"Expected a scalar tensor for tensor {name}; it has {value.size} elements.")
    first = value.reshape(-1)[0]
    return first.item() if isinstance(first, np.generic) else _text(first, name)


def _text(value: Any, name: str) -> str:
    """Return a text. Raises ValueError for one that is longer than any prompt."""
    if isinstance(value, bytes) and len(value) > MOST_BYTES:
        raise ValueError(f"{name} has {len(value)} bytes; at most {MOST_BYTES} are allowed.")
    return decoded(value, name) if isinstance(value, bytes) else str(value)


Outputs = dict[str, NDArray[Any]]

# Output → field of the KV cache's metrics.
_CACHE = {
    "kv_cache_reused_block": "num_reused_blocks",
    "kv_cache_missed_block": "num_missed_blocks",
    "kv_cache_alloc_new_blocks": "num_new_allocated_blocks",
    "kv_cache_alloc_total_blocks": "num_total_allocated_blocks",
}


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
        arrays.update(performance(metrics, _CACHE))
        arrays["kv_cache_hit_rate"] = np.array([metrics.kv_cache_metrics.kv_cache_hit_rate], dtype=np.float32)
    return arrays


def _texts(values: Sequence[str]) -> NDArray[Any]:
    return np.array([value.encode("utf-8") for value in values], dtype=np.object_)

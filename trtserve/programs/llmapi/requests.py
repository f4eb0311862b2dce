"""Turn the tensors of a Triton request into a prompt, keywords of `SamplingParams`, and the wanted outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Inputs = Mapping[str, NDArray[Any]]

_PREFIX = "sampling_param_"
# These have any number of elements.
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
            words = [_text(word, name) for word in value.reshape(-1)]
            keywords[keyword] = [word for word in words if word] or None
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
    return value.reshape(-1)[0].item() if isinstance(value.reshape(-1)[0], np.generic) else value.reshape(-1)[0]


def _text(value: Any, name: str) -> str:
    try:
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}.") from error

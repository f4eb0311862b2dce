"""One request to the BLS model in front of the LLM API: its inputs there, and its answers here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..shared.inner_models import Tensors, call_streamed, stop_text_request
from .names import COUNTS, NEUTRAL, OTHERS, OUTPUTS, SAMPLING, WORDS

_REASONS = {b"length": b"length", b"timeout": b"timed_out", b"cancelled": b"cancelled"}


@dataclass(frozen=True, kw_only=True)
class LlmModel:
    """The model of the LLM API, and how its answers are sent."""

    name: str
    outputs: tuple[str, ...]
    """The outputs of the BLS model."""
    accumulate: bool = False
    """Whether each streamed response holds the whole text so far."""


class LlmBlsRequest:
    """Runs one request."""

    def __init__(self, model: LlmModel, inputs: Tensors, request_id: str, cancelled: threading.Event) -> None:
        """ValueError names the first input that is not supported."""
        _check(inputs)
        self._model, self._request_id, self._cancelled = model, request_id, cancelled
        self._prompt = inputs["text_input"].reshape(-1)[0].decode("utf-8")
        self._streamed = _is_set(inputs, "stream")
        self._excludes = bool(np.any(inputs.get("exclude_input_in_output", False)))
        self._reason = _is_set(inputs, "return_finish_reason")
        self._metrics = _is_set(inputs, "return_perf_metrics") or _is_set(inputs, "return_kv_cache_reuse_stats")
        self._counts = [name for name in COUNTS if _is_set(inputs, name)]
        self._inputs = _llm_inputs(inputs, reason=self._reason)
        self._inputs |= {name: np.array([True]) for name in self._counts}

    def answers(self) -> Iterator[Tensors]:
        """Yield the answers; InnerModelError carries the message of the model that refused the request."""
        before, counted = "", 0
        wanted = ["text_output", *(["finish_reason", "stop_reason"] if self._reason else [])]
        wanted += [COUNTS[name] for name in self._counts]
        wanted += [OUTPUTS[name] for name in self._model.outputs if self._metrics and name in OUTPUTS]
        for answer in call_streamed(self._model.name, self._inputs, wanted, self._request_id):
            text = answer["text_output"].reshape(-1)[0].decode("utf-8")
            piece, others = self._piece(text, before), self._others(answer, counted)
            if piece or others or not self._streamed:
                yield {"text_output": np.array([piece.encode("utf-8")], dtype=np.object_), **others}
            before = text
            counted = int(answer["num_output_tokens"][0]) if "num_output_tokens" in answer else 0
            if self._cancelled.is_set():
                stop_text_request(self._model.name, self._request_id)

    def _piece(self, text: str, before: str) -> str:
        """Return the text to send; each answer of the LLM API holds the whole text so far."""
        if not self._streamed:
            return text if self._excludes else self._prompt + text
        if self._model.accumulate:
            return text
        return text.removeprefix(before)

    def _others(self, answer: Tensors, counted: int) -> Tensors:
        """Return the outputs besides the text; each answer of a stream counts its own tokens."""
        found = {name: answer[inner].reshape(1, -1) for name, inner in OUTPUTS.items() if inner in answer}
        if "num_input_tokens" in answer:
            found["num_input_tokens"] = answer["num_input_tokens"].reshape(1, 1)
        if "num_output_tokens" in answer:
            found["num_output_tokens"] = answer["num_output_tokens"].reshape(1, 1) - np.int32(counted)
        if "finish_reason" in answer and "finish_reason" in self._model.outputs:
            word = _reason(answer["finish_reason"].reshape(-1)[0], answer["stop_reason"].reshape(-1)[0])
            found |= {"finish_reason": np.array([[word]], dtype=np.object_)} if word else {}
        return {name: value for name, value in found.items() if name in self._model.outputs}


def _reason(finish: bytes, stop: bytes) -> bytes | None:
    """Return the executor's word for the finish reason, or None while the text goes on."""
    if finish == b"stop":
        return b"end_id" if stop in (b"None", b"") else b"stop_words"
    return _REASONS.get(finish)


def _check(inputs: Tensors) -> None:
    text, limit = inputs.get("text_input"), inputs.get("max_tokens")
    if text is None or text.size == 0:
        raise ValueError("text_input is required")
    if text.size > 1:
        raise ValueError(f"text_input has {text.size} prompts; the LLM API's model takes one per request.")
    if limit is None or limit.size != 1 or int(limit.reshape(-1)[0]) <= 0:
        raise ValueError("max_tokens must be a single value > 0")
    known = {*SAMPLING, *WORDS, *OTHERS}
    for name in inputs:
        if name not in known and _is_set(inputs, name):
            raise ValueError(
                f"{name} is not supported on the llmapi runtime; leave it out, or serve a TensorRT-LLM engine."
            )


def _is_set(inputs: Tensors, name: str) -> bool:
    """Return whether an input has a value that is not neutral; most clients send neutral values too."""
    value: Any = inputs.get(name)
    if value is None:
        return False
    if not isinstance(value, np.ndarray):  # a BF16 tensor, which NumPy cannot hold
        return True
    return bool(np.any(value != NEUTRAL[name] if name in NEUTRAL else value))


def _llm_inputs(inputs: Tensors, *, reason: bool) -> Tensors:
    result: Tensors = {
        "text_input": inputs["text_input"].reshape(1),
        "streaming": np.array([_is_set(inputs, "stream")]),
        # The prompt is added here, as the client wrote it.
        "sampling_param_exclude_input_from_output": np.array([True]),
    }
    given: dict[str, str] = {}
    for name, parameter in SAMPLING.items():
        if name not in inputs or (name == "top_p" and not inputs[name].reshape(-1)[0] > 0):
            continue
        value = inputs[name].reshape(1)
        inner = f"sampling_param_{parameter}"
        if inner in result and result[inner][0] != value[0]:
            both = f"{given[inner]} {result[inner][0]} and {name} {value[0]}"
            raise ValueError(f"Two names of one setting were given with different values: {both}.")
        result[inner], given[inner] = value, name
    for name, parameter in WORDS.items():
        if _is_set(inputs, name):
            result[f"sampling_param_{parameter}"] = inputs[name].reshape(-1)
    if "sampling_param_stop" in result:
        result["sampling_param_include_stop_str_in_output"] = np.array([True])
    if reason:
        result |= {"return_finish_reason": np.array([True]), "return_stop_reason": np.array([True])}
    return result

"""Triton model with the tensors of `tensorrt_llm_bls`, in front of the model of TensorRT-LLM's LLM API."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ..shared.arrays import Tensors
from ..shared.inner_models import InnerModelError, call_streamed, stop_text_request
from ..shared.parameters import ModelParameters
from ..shared.text_model import TextModel

SAMPLING = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "length_penalty": "length_penalty",
    "min_tokens": "min_tokens",
    "min_length": "min_tokens",
    "seed": "seed",
    "random_seed": "seed",
    "end_id": "end_id",
    "pad_id": "pad_id",
    "return_perf_metrics": "return_perf_metrics",
    "return_kv_cache_reuse_stats": "return_perf_metrics",
}
"""Input → parameter of SamplingParams; two names of one parameter must agree."""

WORDS = {"stop_words": "stop", "bad_words": "bad"}

COUNTS = {"return_num_input_tokens": "num_input_tokens", "return_num_output_tokens": "num_output_tokens"}
"""Input → output of the same names in both models."""

OTHERS = ("text_input", "stream", "exclude_input_in_output", "return_finish_reason", *COUNTS)
"""Inputs that `request.py` handles itself."""

NEUTRAL = {"beam_width": 1, "num_return_sequences": 1}  # input → its neutral value; for all others it is 0, False or ""

OUTPUTS = {
    "kv_cache_alloc_new_blocks": "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks": "kv_cache_reused_block",
    "kv_cache_alloc_total_blocks": "kv_cache_alloc_total_blocks",
    **{
        name: name
        for name in (
            "arrival_time_ns",
            "first_scheduled_time_ns",
            "first_token_time_ns",
            "last_token_time_ns",
            "acceptance_rate",
            "total_accepted_draft_tokens",
            "total_draft_tokens",
        )
    },
}
"""Output → output of the model of the LLM API, given when return_perf_metrics asks for it."""


_REASONS = {b"length": b"length", b"timeout": b"timed_out", b"cancelled": b"cancelled"}


@dataclass(frozen=True, kw_only=True)
class LlmModel:
    """The model of the LLM API, and how its answers are sent."""

    name: str
    outputs: tuple[str, ...]  # the outputs of the BLS model
    accumulate: bool = False  # whether each streamed response holds the whole text so far


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
        if name not in inputs or (name == "top_p" and inputs[name].reshape(-1)[0] == 0):
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


class TritonPythonModel(TextModel):
    """Maps inputs and outputs; an input without a counterpart is refused by name."""

    def prepare(self, config: dict[str, Any], folder: Path, parameters: ModelParameters) -> None:
        self._model = LlmModel(
            name=parameters.text("tensorrt_llm_model_name") or "tensorrt_llm",
            outputs=tuple(output["name"] for output in config["output"]),
            accumulate=parameters.choice("accumulate_tokens", default=False),
        )

    def answers(self, inputs: Tensors, inner_id: str, cancelled: threading.Event) -> Iterator[Tensors]:
        return LlmBlsRequest(self._model, inputs, inner_id, cancelled).answers()

    def stop(self, inner_id: str, inputs: Tensors) -> None:
        try:
            stop_text_request(self._model.name, inner_id)
        except (InnerModelError, RuntimeError) as error:
            pb_utils.Logger.log_error(f"A cancelled request could not be stopped in {self._model.name}: {error}")

"""One request as the tensors of the model that is measured, and what is read of its responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtserve.bench.traffic import TrafficRequest
from trtserve.triton.client import ModelDescription, infer_request, reply_of
from trtserve.triton.tensors import Tensor

IDS_INPUT = "input_ids"
TEXT_INPUT = "text_input"
TOKENS_OUTPUT = "output_ids"
TEXT_OUTPUT = "text_output"
REASON_OUTPUT = "finish_reason"
REASON_INPUT = f"return_{REASON_OUTPUT}"
OUTPUT_COUNT, INPUT_COUNT = "num_output_tokens", "num_input_tokens"
# A model of the LLM API names its inputs after SamplingParams, and each answer of a stream holds all so far.
LLM_API_LENGTH = "sampling_param_max_tokens"
# Outputs that a model sends only when the input of the same name asks for them: return_num_output_tokens.
COUNTS = (OUTPUT_COUNT, INPUT_COUNT)
UNFINISHED = ("", "not_finished")


@dataclass(frozen=True, kw_only=True)
class TextResponse:
    """One response of a text model: when it came (nanoseconds) and its text.

    `tokens` are its new tokens and `prompt_tokens` those of the prompt, None where the model does not count them.
    """

    time: int
    text: str
    tokens: int | None = None
    prompt_tokens: int | None = None


def takes_text(model: ModelDescription) -> bool:
    """Whether prompts reach the model as text; models that take token ids are measured with those."""
    return TEXT_INPUT in model.inputs and IDS_INPUT not in model.inputs


def request_message(model: ModelDescription, request: TrafficRequest, *, request_id: str) -> Any:
    """The protobuf message of one request."""
    tensors = core_tensors(model, request) if request.text is None else text_tensors(model, request)
    return infer_request(model.name, tensors, request_id=request_id, outputs=_wanted_outputs(model))


def core_tensors(model: ModelDescription, request: TrafficRequest) -> list[Tensor]:
    """Inputs of a core model; without an end id the answer has its full length."""
    values: dict[str, Sequence[Any]] = {
        IDS_INPUT: request.token_ids,  # type: ignore[dict-item]
        "input_lengths": [len(request.token_ids)],
        "request_output_len": [request.output_len],
        **_optional(model, {"streaming": model.decoupled, "exclude_input_in_output": True, REASON_INPUT: True}),
        **_end(model, request),
    }
    return [model.tensor(name, value) for name, value in values.items()]


def text_tensors(model: ModelDescription, request: TrafficRequest) -> list[Tensor]:
    """Inputs of the ensemble, the BLS model, its alias, or a model of the LLM API."""
    switches = {
        model.first_input("stream", "streaming"): model.decoupled,
        model.first_input("exclude_input_in_output", "sampling_param_exclude_input_from_output"): True,
        REASON_INPUT: True,
        **{f"return_{name}": True for name in COUNTS},
    }
    values: dict[str, Sequence[Any]] = {
        TEXT_INPUT: [request.text],
        model.first_input("max_tokens", LLM_API_LENGTH): [request.output_len],
        **_optional(model, switches),
        **_end(model, request),
    }
    return [model.tensor(name, value) for name, value in values.items()]


def _optional(model: ModelDescription, switches: dict[str, bool]) -> dict[str, list[bool]]:
    return {name: [value] for name, value in switches.items() if name in model.inputs}


def _end(model: ModelDescription, request: TrafficRequest) -> dict[str, list[int]]:
    name = end_input(model)
    return {} if request.end_id is None or name not in model.inputs else {name: [request.end_id]}


def end_input(model: ModelDescription) -> str:
    """Name of the input that says which token ends an answer; the model need not have it."""
    return model.first_input("end_id", "sampling_param_end_id")


def _wanted_outputs(model: ModelDescription) -> tuple[str, ...]:
    main = (TEXT_OUTPUT,) if takes_text(model) else (TOKENS_OUTPUT, "sequence_length")
    asked = (REASON_OUTPUT, *(COUNTS if takes_text(model) else ()))
    return (*main, *(name for name in asked if f"return_{name}" in model.inputs and name in model.outputs))


def token_count(response: Any) -> int:
    """Length of the last axis of output_ids; the shape suffices, so nothing is decoded."""
    shapes = (output.shape for output in response.outputs if output.name == TOKENS_OUTPUT)
    return next((int(shape[-1]) for shape in shapes if len(shape)), 0)


def finish_reason(response: Any) -> str | None:
    """Why the answer ended; None in responses before its end, and from models that do not tell."""
    if not any(output.name == REASON_OUTPUT for output in response.outputs):
        return None
    reason: str = reply_of(response).outputs[REASON_OUTPUT].reshape(-1)[0]
    return reason if reason not in UNFINISHED else None


def text_response(response: Any, *, time: int) -> TextResponse:
    """Text and count of a response of a text model."""
    outputs = reply_of(response).outputs
    first = {name: array.reshape(-1)[0] for name, array in outputs.items() if array.size}
    counts = {name: int(first[name]) for name in COUNTS if name in first}
    return TextResponse(
        time=time,
        text=str(first.get(TEXT_OUTPUT, "")),
        tokens=counts.get(OUTPUT_COUNT),
        prompt_tokens=counts.get(INPUT_COUNT),
    )


def new_responses(model: ModelDescription, responses: Sequence[TextResponse]) -> list[TextResponse]:
    """The responses of a stream with what is new in each: some models send all text so far, some the count as well."""
    whole = LLM_API_LENGTH in model.inputs
    if not whole and not model.flag("accumulate_tokens"):
        return list(responses)
    found, text, tokens = [], 0, 0
    for each in responses:
        new = each.tokens if each.tokens is None or not whole else each.tokens - tokens
        found.append(replace(each, text=each.text[text:], tokens=new))
        text, tokens = len(each.text), each.tokens or 0
    return found


def repeats_prompt(model: ModelDescription) -> bool:
    """Whether a whole answer begins with the prompt: releases without the switch decide it by a parameter."""
    switch = model.has("exclude_input_in_output", "sampling_param_exclude_input_from_output")
    return not switch and not model.flag("exclude_input_in_output")

"""Build the request messages for the measured model and read its responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtserve.bench.records import Response
from trtserve.bench.requests import TrafficRequest
from trtserve.client.base import ModelDescription
from trtserve.client.grpc_client import infer_request, reply_of
from trtserve.client.tensors import Tensor

IDS_INPUT = "input_ids"
TEXT_INPUT = "text_input"
TOKENS_OUTPUT = "output_ids"
TEXT_OUTPUT = "text_output"
REASON_OUTPUT = "finish_reason"
REASON_INPUT = f"return_{REASON_OUTPUT}"
OUTPUT_COUNT, INPUT_COUNT = "num_output_tokens", "num_input_tokens"
# A model of the LLM API names its inputs after SamplingParams; each streamed response repeats all text so far.
LLM_API_LENGTH = "sampling_param_max_tokens"
# Outputs that a model sends only if an input such as return_num_output_tokens requests them.
COUNTS = (OUTPUT_COUNT, INPUT_COUNT)
UNFINISHED = ("", "not_finished", "None")  # the last one from NVIDIA's LLM API model


def takes_text(model: ModelDescription) -> bool:
    """Return whether the model's prompts are text; models that take token ids as well get those."""
    return TEXT_INPUT in model.inputs and IDS_INPUT not in model.inputs


def request_message(model: ModelDescription, request: TrafficRequest, *, request_id: str, stream: bool) -> Any:
    """Return the protobuf message of one request."""
    outputs = (TEXT_OUTPUT,) if takes_text(model) else (TOKENS_OUTPUT, "sequence_length")
    optional = (REASON_OUTPUT, *(COUNTS if takes_text(model) else ()))
    outputs += tuple(name for name in optional if f"return_{name}" in model.inputs and name in model.outputs)
    tensors = request_tensors(model, request, stream=stream)
    return infer_request(model.name, tensors, request_id=request_id, outputs=outputs)


def request_tensors(model: ModelDescription, request: TrafficRequest, *, stream: bool) -> list[Tensor]:
    """Return the inputs of a request; `stream`: the answer shall arrive piece by piece."""
    make = core_tensors if request.text is None else text_tensors
    return make(model, request, stream=stream)


def core_tensors(model: ModelDescription, request: TrafficRequest, *, stream: bool) -> list[Tensor]:
    """Return the inputs of a core model; without an end id the answer has its full length."""
    values: dict[str, Sequence[Any]] = {
        IDS_INPUT: request.token_ids,  # type: ignore[dict-item]
        "input_lengths": [len(request.token_ids)],
        "request_output_len": [request.output_len],
        **_supported(model, {"streaming": stream, "exclude_input_in_output": True, REASON_INPUT: True}),
        **_end_id(model, request),
    }
    return [model.tensor(name, value) for name, value in values.items()]


def text_tensors(model: ModelDescription, request: TrafficRequest, *, stream: bool) -> list[Tensor]:
    """Return the inputs of the ensemble, the BLS model, its alias, or a model of the LLM API."""
    switches = {
        model.first_input("stream", "streaming"): stream,
        model.first_input("exclude_input_in_output", "sampling_param_exclude_input_from_output"): True,
        REASON_INPUT: True,
        **{f"return_{name}": True for name in COUNTS},
    }
    values: dict[str, Sequence[Any]] = {
        TEXT_INPUT: [request.text],
        model.first_input("max_tokens", LLM_API_LENGTH): [request.output_len],
        **_supported(model, switches),
        **_end_id(model, request),
    }
    return [model.tensor(name, value) for name, value in values.items()]


def _supported(model: ModelDescription, switches: dict[str, bool]) -> dict[str, list[bool]]:
    return {name: [value] for name, value in switches.items() if name in model.inputs}


def _end_id(model: ModelDescription, request: TrafficRequest) -> dict[str, list[int]]:
    name = end_input(model)
    return {} if request.end_id is None or name not in model.inputs else {name: [request.end_id]}


def end_input(model: ModelDescription) -> str:
    """Return the name of the input for the end token; the model may not have it."""
    return model.first_input("end_id", "sampling_param_end_id")


def read_response(model: ModelDescription, response: Any, time_ns: int) -> Response:
    """Read a ModelInferResponse."""
    outputs = {name: array.reshape(-1).tolist() for name, array in reply_of(response).outputs.items()}
    return read_values(model, outputs, time_ns)


def read_values(model: ModelDescription, outputs: Mapping[str, Any], time_ns: int) -> Response:
    """Read the outputs of a response by name; values are single or in flat lists."""
    first = {name: value[0] if isinstance(value, list) and value else value for name, value in outputs.items()}
    reason = first.get(REASON_OUTPUT)
    reason = None if reason in (None, [], *UNFINISHED) else str(reason)
    if not takes_text(model):
        ids = outputs.get(TOKENS_OUTPUT, [])
        ids = tuple(ids) if isinstance(ids, list) else (ids,)
        return Response(time_ns=time_ns, tokens=len(ids), ids=ids, finish_reason=reason)
    counts = {name: int(first[name]) for name in COUNTS if first.get(name) not in (None, [])}
    text = first.get(TEXT_OUTPUT)
    return Response(
        time_ns=time_ns,
        text=text if isinstance(text, str) else "",
        tokens=counts.get(OUTPUT_COUNT),
        prompt_tokens=counts.get(INPUT_COUNT),
        finish_reason=reason,
    )


def new_responses(model: ModelDescription, responses: Sequence[Response]) -> list[Response]:
    """Reduce each streamed response to its new text and tokens; some models repeat the text or the count so far."""
    cumulative = LLM_API_LENGTH in model.inputs
    if not cumulative and not model.flag("accumulate_tokens"):
        return list(responses)
    found, text, tokens = [], 0, 0
    for each in responses:
        whole = each.text or ""
        new = each.tokens if each.tokens is None or not cumulative else each.tokens - tokens
        found.append(replace(each, text=whole[text:], tokens=new))
        text, tokens = len(whole), each.tokens or 0
    return found


def repeats_prompt(model: ModelDescription) -> bool:
    """Return whether an unstreamed answer begins with the prompt; releases without the input decide by a parameter."""
    switch = model.has("exclude_input_in_output", "sampling_param_exclude_input_from_output")
    return not switch and not model.flag("exclude_input_in_output")

"""Build the messages of requests, read the responses, and count the tokens in the answers of a text model."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from trtserve.bench.records import DecodedResponse, RequestRecord, TrafficRequest
from trtserve.client.grpc_transport import infer_request, reply_of
from trtserve.client.tensors import IDS_INPUT, IDS_OUTPUT, TEXT_INPUT, TEXT_OUTPUT, VLLM_INPUT, ModelDescription, Tensor
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import UsageError

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
    outputs = (TEXT_OUTPUT,) if takes_text(model) else (IDS_OUTPUT, "sequence_length")
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
    values: dict[str, Sequence[Any]] = {TEXT_INPUT: [request.text], **_supported(model, switches)}
    if VLLM_INPUT in model.inputs:
        asked = {"max_tokens": request.output_len, "temperature": 0}
        if request.end_id is not None:
            asked |= {"ignore_eos": True, "min_tokens": request.output_len}
        values[VLLM_INPUT] = [json.dumps(asked)]
    else:
        values |= {model.first_input("max_tokens", LLM_API_LENGTH): [request.output_len], **_end_id(model, request)}
    return [model.tensor(name, value) for name, value in values.items()]


def _supported(model: ModelDescription, switches: dict[str, bool]) -> dict[str, list[bool]]:
    return {name: [value] for name, value in switches.items() if name in model.inputs}


def _end_id(model: ModelDescription, request: TrafficRequest) -> dict[str, list[int]]:
    name = _end_input(model)
    return {} if request.end_id is None or name not in model.inputs else {name: [request.end_id]}


def _end_input(model: ModelDescription) -> str:
    """Return the name of the input for the end token; the model may not have it."""
    return model.first_input("end_id", "sampling_param_end_id")


def ignores_end(model: ModelDescription) -> bool:
    """Return whether a request can ask the model to go on after its end token."""
    return model.has(_end_input(model), VLLM_INPUT)


def read_response(model: ModelDescription, response: Any, time_ns: int) -> DecodedResponse:
    outputs = {name: array.reshape(-1).tolist() for name, array in reply_of(response).outputs.items()}
    return read_values(model, outputs, time_ns)


def read_values(model: ModelDescription, outputs: Mapping[str, Any], time_ns: int) -> DecodedResponse:
    """Read the outputs of a response by name; values are single or in flat lists."""
    first = {name: value[0] if isinstance(value, list) and value else value for name, value in outputs.items()}
    reason = first.get(REASON_OUTPUT)
    reason = None if reason in (None, [], *UNFINISHED) else str(reason)
    if not takes_text(model):
        ids = outputs.get(IDS_OUTPUT, [])
        ids = tuple(ids) if isinstance(ids, list) else (ids,)
        return DecodedResponse(time_ns=time_ns, tokens=len(ids), ids=ids, finish_reason=reason)
    counts = {name: int(first[name]) for name in COUNTS if first.get(name) not in (None, [])}
    text = first.get(TEXT_OUTPUT)
    return DecodedResponse(
        time_ns=time_ns,
        text=text if isinstance(text, str) else "",
        tokens=counts.get(OUTPUT_COUNT),
        prompt_tokens=counts.get(INPUT_COUNT),
        finish_reason=reason,
    )


def new_responses(model: ModelDescription, responses: Sequence[DecodedResponse]) -> list[DecodedResponse]:
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


Counter = Literal["server", "tokenizer"]


@dataclass(frozen=True, kw_only=True)
class AnswerCounts:
    """Tokens of the completed answers and prompts; counts by the server are None where it does not report them."""

    by: Counter  # who counted the output tokens of the report
    by_tokenizer: int | None
    by_server: int | None
    prompts_by_tokenizer: int
    prompts_by_server: int | None

    def notes(self, files: TokenizerFiles | None) -> list[str]:
        """Explain how the output tokens were counted, and where server and tokenizer disagree."""
        if files is None:
            return ["The server counted the output tokens; no tokenizer was here to compare."]
        if self.by == "tokenizer":
            notes = [
                f"The server does not count output tokens; the tokenizer in {files.folder} counted them in the text."
            ]
        elif self.by_server in (None, self.by_tokenizer):
            notes = ["The server counted the output tokens."]
        else:
            notes = [f"The server counted {self.by_server} output tokens; the text alone gives {self.by_tokenizer}."]
        if self.prompts_by_server is not None and self.prompts_by_server != self.prompts_by_tokenizer:
            notes.append(
                f"The server counted {self.prompts_by_server} prompt tokens, the tokenizer in {files.folder} "
                f"{self.prompts_by_tokenizer}: it is not the server's tokenizer."
            )
        return notes


def count_answers(
    records: Sequence[RequestRecord],
    requests: Sequence[TrafficRequest],
    model: ModelDescription,
    files: TokenizerFiles | None,
    *,
    whole: bool = False,
) -> AnswerCounts:
    """Fill `arrivals` of every record from its texts.

    Uses the server's counts if every completed answer has them, because some tokens are not visible in the text;
    otherwise the tokenizer counts the joined text of each answer. `whole`: the server counts the answer so far, with
    every response or once at its end; then its tokens are divided among the responses. Raises UsageError if neither can
    count.
    """
    for record, request in zip(records, requests, strict=True):
        record.responses = new_texts(record, model, prompt=request.text or "")
        if whole:
            record.responses = new_counts(record.responses)
        texts = [each.text or "" for each in record.responses]
        by_text = [int(bool(text)) for text in texts] if files is None else token_counts(files, texts)
        counted = [each.tokens for each in record.responses if each.tokens is not None]
        # Of reasoning that a server hides there is no text at all.
        partial = counted and (any(each.in_markup for each in record.responses) or not any(texts))
        record.tokenizer_tokens = None if files is None or partial else sum(by_text)
        record.server_tokens = sum(counted) if counted else None
        record.arrivals = token_arrivals(record.responses, by_text)
        prompt = next((each.prompt_tokens for each in record.responses if each.prompt_tokens), None)
        if request.session is not None and prompt is not None:
            record.input_tokens = prompt  # the answers before it are known as text only
    completed = [record for record in records if record.status == "completed"]
    by_server = _total([record.server_tokens for record in completed])
    if by_server is None and files is None:
        raise UsageError(
            "The server does not count the tokens of its answers, and there is no tokenizer to count them.",
            hint="Give the tokenizer's folder with --tokenizer.",
        )
    if by_server is not None:
        for record in records:
            counts = [each.tokens or 0 for each in record.responses]
            if whole and any(each.text and each.tokens is None for each in record.responses):
                record.arrivals = divided(record.arrivals, sum(counts))
            else:
                record.arrivals = token_arrivals(record.responses, counts)
    return AnswerCounts(
        by="tokenizer" if by_server is None else "server",
        by_tokenizer=None if files is None else sum(record.tokenizer_tokens or 0 for record in completed),
        by_server=by_server,
        prompts_by_tokenizer=sum(record.input_tokens for record in completed),
        prompts_by_server=_total(
            [
                next((each.prompt_tokens for each in record.responses if each.prompt_tokens), None)
                for record in completed
            ]
        ),
    )


def new_counts(responses: Sequence[DecodedResponse]) -> list[DecodedResponse]:
    """Reduce counts of the whole answer so far to the tokens that are new."""
    found, before = [], 0
    for each in responses:
        new = None if each.tokens is None else max(0, each.tokens - before)
        found.append(replace(each, tokens=new))
        before += new or 0
    return found


def divided(arrivals: Sequence[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    """Return arrivals whose tokens add up to `total`, in the proportions of the given ones."""
    given, found, before = sum(tokens for _, tokens in arrivals), [], 0
    seen = 0
    for time, tokens in arrivals:
        seen += tokens
        until = round(total * seen / given)
        if until > before:
            found.append((time, until - before))
        before = until
    return found


def _total(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known and len(known) == len(numbers) else None


def new_texts(record: RequestRecord, model: ModelDescription, *, prompt: str) -> list[DecodedResponse]:
    """Reduce each response to its new text, and remove the prompt from an answer that repeats it."""
    if record.streamed:
        return new_responses(model, record.responses)
    texts = list(record.responses)
    if texts and repeats_prompt(model):
        texts[0] = replace(texts[0], text=(texts[0].text or "").removeprefix(prompt))
    return texts


def token_counts(files: TokenizerFiles, texts: Sequence[str]) -> list[int]:
    """Return how many tokens of the joined text end in each part."""
    joined, ends = "".join(texts), list(accumulate(map(len, texts)))
    counts = [0] * len(texts)
    if not joined:
        return counts
    if files.tokenizer.is_fast:
        encoding = files.tokenizer(joined, add_special_tokens=False, return_offsets_mapping=True)
        for _, end in encoding["offset_mapping"]:
            counts[bisect_left(ends, end)] += 1
        return counts
    totals = [len(files.encode(joined[:end], special=False)) for end in ends]
    return [max(0, after - before) for before, after in zip([0, *totals], totals, strict=False)]


def token_arrivals(texts: Sequence[DecodedResponse], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return time and number of tokens of each response; a token arrives with the response that shows its text.

    Tokens after the last text (the end token) count as part of the last response.
    """
    arrivals: list[tuple[int, int]] = []
    pending = 0
    for response, count in zip(texts, tokens, strict=True):
        pending += count
        if pending and response.text:
            arrivals.append((response.time_ns, pending))
            pending = 0
    return [*arrivals, (texts[-1].time_ns, pending)] if pending else arrivals

"""The check of end_to_end_test.py: the three models called one by one give the text that the whole pipeline gives."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from trtserve.bench.plan import BenchPlan
from trtserve.client.grpc_transport import grpc_client
from trtserve.client.tensors import CORE_MODEL, ModelDescription, Tensor
from trtserve.client.transport import SyncClient
from trtserve.errors import AnswerMismatchError
from trtserve.progress import SILENT, Progress

_TIMEOUT = 600.0


def check_pipeline(plan: BenchPlan, *, draft_tokens: int | None = None, progress: Progress = SILENT) -> int:
    """Compare the texts of every prompt of the plan; return how many were compared.

    With `draft_tokens` also the answers of the model with and without speculative decoding. Raises
    AnswerMismatchError for the first difference, and RequestError.
    """
    target = plan.load().target
    with closing(grpc_client(plan.endpoint, timeout=_TIMEOUT)) as client:
        models = {name: client.describe(name) for name in ("preprocessing", CORE_MODEL, "postprocessing")}
        with progress.task(f"Checking {len(plan.traffic.requests)} answers", total=len(plan.traffic.requests)) as task:
            for request in plan.traffic.requests:
                prompt, tokens = request.text or "", request.output_len
                whole = _answer(client, target.model, prompt, tokens)
                _same(
                    _by_hand(client, models, prompt, tokens),
                    whole,
                    prompt,
                    f"the models one by one and {target.model.name}",
                )
                if draft_tokens is not None:
                    drafted = _answer(client, target.model, prompt, tokens, num_draft_tokens=[draft_tokens])
                    _same(drafted, whole, prompt, f"{target.model.name} with and without draft tokens")
                task.advance(1)
    return len(plan.traffic.requests)


def _answer(client: SyncClient, model: ModelDescription, prompt: str, tokens: int, **more: Sequence[Any]) -> str:
    values: dict[str, Sequence[Any]] = {"text_input": [prompt], "max_tokens": [tokens], **more}
    if "exclude_input_in_output" in model.inputs:
        values["exclude_input_in_output"] = [True]
    outputs = _call(client, model, values, ("text_output",))
    return str(outputs["text_output"].reshape(-1)[0])


def _by_hand(client: SyncClient, models: Mapping[str, ModelDescription], prompt: str, tokens: int) -> str:
    """Return the text of preprocessing → tensorrt_llm → postprocessing."""
    before = models["preprocessing"]
    asked = {"QUERY": [prompt], "REQUEST_OUTPUT_LEN": [tokens]}
    made = _call(client, before, asked, ())
    core = models[CORE_MODEL]
    values: dict[str, Any] = {
        "input_ids": made["INPUT_ID"].reshape(-1),
        "input_lengths": made["REQUEST_INPUT_LEN"].reshape(-1).tolist(),
        "request_output_len": [tokens],
    }
    for output, name in (("OUT_END_ID", "end_id"), ("OUT_PAD_ID", "pad_id")):
        if output in made and name in core.inputs:
            values[name] = made[output].reshape(-1).tolist()[:1]
    if "exclude_input_in_output" in core.inputs:
        values["exclude_input_in_output"] = [True]
    generated = _call(client, core, values, ("output_ids", "sequence_length"))
    ids, lengths = generated["output_ids"], generated["sequence_length"]
    after = models["postprocessing"]
    tensors = [
        Tensor(name="TOKENS_BATCH", datatype="INT32", shape=tuple(ids.shape), values=ids),
        Tensor(name="SEQUENCE_LENGTH", datatype="INT32", shape=tuple(lengths.shape), values=lengths),
    ]
    (reply,) = client.infer(after, tensors, request_id="", stream=False, outputs=("OUTPUT",))
    return str(reply.outputs["OUTPUT"].reshape(-1)[0])


def _call(
    client: SyncClient, model: ModelDescription, values: Mapping[str, Any], outputs: Sequence[str]
) -> Mapping[str, Any]:
    tensors = [model.tensor(name, value) for name, value in values.items()]
    replies = client.infer(model, tensors, request_id=uuid.uuid4().hex, stream=False, outputs=outputs)
    return next(reply.outputs for reply in replies if reply.outputs)


def _same(first: str, second: str, prompt: str, between: str) -> None:
    if first != second:
        raise AnswerMismatchError(
            f"{between} answer {prompt[:60]!r} differently: {first[:200]!r} and {second[:200]!r}.",
            hint="Compare the parameters of the models: trtserve check REPOSITORY.",
        )

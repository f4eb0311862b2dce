"""Tensors, descriptions and error texts of the Triton clients, without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from trtserve.client.endpoint import plain, refused
from trtserve.client.grpc_transport import infer_request, reply_of
from trtserve.client.http_transport import generate_body
from trtserve.client.request import RequestContext, request_tensors
from trtserve.client.spec import QuerySpec
from trtserve.client.tensors import ModelDescription, Tensor
from trtserve.client.tokenizer import PreparedPrompts
from trtserve.errors import RequestError, UsageError
from trtserve.library import Client


def describe(*inputs: str, max_batch_size: int = 8, **settings: str) -> ModelDescription:
    """A text model whose inputs are given as `name TYPE dim`."""
    fields = (declared.split() for declared in ("text_input STRING 1", "max_tokens INT32 1", *inputs))
    return ModelDescription.from_config(
        {
            "name": "demo",
            "max_batch_size": max_batch_size,
            "input": [{"name": name, "data_type": f"TYPE_{kind}", "dims": [dim]} for name, kind, dim in fields],
            "model_transaction_policy": {"decoupled": True},
            "parameters": {key: {"string_value": value} for key, value in settings.items()},
        }
    )


def values_of(model: ModelDescription, *, prompt: str = "p", **options: object) -> dict[str, list[object]]:
    prompts = PreparedPrompts(texts=(prompt,))
    context = RequestContext(spec=QuerySpec(prompts=prompts.texts, options=options), model=model, prompts=prompts)
    return {tensor.name: tensor.flat() for tensor in request_tensors(context)}


def test_strings_are_length_prefixed() -> None:
    tensor = Tensor(name="text_input", datatype="BYTES", shape=(1, 2), values=["é", ""])
    assert tensor.raw() == b"\x02\x00\x00\x00\xc3\xa9\x00\x00\x00\x00"


def test_numbers_are_little_endian() -> None:
    assert Tensor(name="x", datatype="INT32", shape=(1, 2), values=[1, -1]).raw() == b"\x01\0\0\0\xff\xff\xff\xff"
    assert Tensor(name="x", datatype="BOOL", shape=(1, 1), values=[True]).raw() == b"\x01"
    array = np.arange(3, dtype=np.int32)
    assert Tensor(name="x", datatype="INT32", shape=(1, 3), values=array.tolist()).raw() == array.tobytes()


def test_shapes_have_the_batch_axis_of_the_model() -> None:
    model = describe("stop_words STRING -1")
    assert model.tensor("stop_words", ["a", "b"]).shape == (1, 2)
    assert model.tensor("max_tokens", [5]).shape == (1, 1)
    assert describe(max_batch_size=0).tensor("max_tokens", [5]).shape == (1,)


def test_unknown_input_lists_the_inputs() -> None:
    with pytest.raises(UsageError, match="no input 'top_k'") as caught:
        describe().tensor("top_k", [1])
    assert caught.value.hint == "Its inputs: max_tokens, text_input."


def test_reply_has_the_values_of_a_response() -> None:
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelInferResponse()
    for tensor in (
        Tensor(name="text_output", datatype="BYTES", shape=(2,), values=["a b", "ü"]),
        Tensor(name="sequence_length", datatype="INT32", shape=(1, 1), values=[3]),
    ):
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(tensor.raw())
    response.parameters["finish_reason"].string_param = "length"
    reply = reply_of(response)
    assert {name: array.tolist() for name, array in reply.outputs.items()} == {
        "text_output": ["a b", "ü"],
        "sequence_length": [[3]],
    }
    assert reply.parameters == {"finish_reason": "length"}


def test_request_names_id_inputs_and_outputs() -> None:
    request = infer_request("demo", [describe().tensor("max_tokens", [5])], request_id="r", outputs=("o",))
    assert (request.model_name, request.id, request.outputs[0].name) == ("demo", "r", "o")
    assert (request.inputs[0].name, list(request.inputs[0].shape)) == ("max_tokens", [1, 1])


def test_query_sends_only_given_options() -> None:
    model = describe("temperature FP32 1", "stream BOOL 1", "stop_words STRING -1")
    assert values_of(model) == {"text_input": ["p"], "max_tokens": [256], "stream": [False]}


@pytest.mark.parametrize(("declared", "name"), [("random_seed", "random_seed"), ("seed", "seed")])
def test_seed_goes_under_the_name_of_the_release(declared: str, name: str) -> None:
    sent = values_of(describe(f"{declared} UINT64 1", "top_k INT32 1"), seed=7, top_k=1)
    assert (sent[name], sent["top_k"]) == ([7], [1])


def test_query_leaves_the_prompt_out_where_the_model_can() -> None:
    assert values_of(describe("exclude_input_in_output BOOL 1"))["exclude_input_in_output"] == [True]


def test_option_without_an_input_is_refused() -> None:
    with pytest.raises(UsageError, match="bad_words"):
        values_of(describe(), bad_words=["x"])


def test_stop_words_are_sent_as_they_stand_inside_a_sentence_too() -> None:
    sent = values_of(describe("stop_words STRING -1"), stop_words=["data", " rules", "", "\n"])["stop_words"]
    assert sent == ["data", " data", " rules", "\n", " \n"]


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_time_for_an_answer_is_above_zero(seconds: float) -> None:
    with pytest.raises(UsageError, match="--timeout"):
        QuerySpec(prompts=("p",), timeout=seconds)


def test_generate_body_has_scalars_and_lists() -> None:
    model = describe("stop_words STRING -1")
    tensors = [model.tensor("max_tokens", [5]), model.tensor("stop_words", ["a", "b"])]
    body = generate_body(tensors, request_id="r", model=model)
    assert body == {"max_tokens": 5, "stop_words": ["a", "b"], "id": "r"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("prompt too long", "prompt too long"),
        ("[request id: 4f-7] Server is stopping", "Server is stopping"),
        ("in ensemble 'ensemble', Encountered an error when fetching new request: no room", "no room"),
        ("prompt too long\n\nAt:\n  /models/1/model.py(3): execute\n", "prompt too long"),
        ("Traceback (most recent call last):\n  File x\nValueError: too long\n", "ValueError: too long"),
        (
            "An error occurred when processing the input values for request id r-1, the error was 'seed is 'x'; wrong'",
            "seed is 'x'; wrong",
        ),
        ("An error occurred when processing the input values, the error was 'no stream'", "no stream"),
    ],
)
def test_server_errors_lose_their_stack(message: str, expected: str) -> None:
    assert plain(message) == expected


def test_dead_stub_has_a_hint() -> None:
    assert "trtserve status" in str(refused("Stub process 'demo_0_0' is not healthy.").hint)
    assert refused("prompt too long").hint is None


def test_prompt_that_is_too_long_has_a_hint() -> None:
    words = "Prompt length (9) exceeds maximum input length (8)."
    error = refused(f"Encountered an error when fetching new request: {words}")
    assert error.message == words
    assert "--max-input-len" in str(error.hint)


@pytest.mark.parametrize(
    ("message", "flag"),
    [
        ("Requested beam width 9 is larger than configured max beam width 4", "--max-beam-width"),
        ("return_context_logits needs an engine that was built with gather_context_logits", "--gather-context-logits"),
        ("Invalid low_rank (32). low_rank must be smaller than mMaxLowRank (8)", "--max-lora-rank"),
        ("LoRA task 9 not found in cache. Please send LoRA weights with request", "--lora-path"),
        ("Draft tokens length (40) exceeds maximum draft tokens length (4).", "--max-draft-len"),
        ("cannot perform speculative decoding without draft model", "--draft-engine"),
    ],
)
def test_refusals_name_the_option_that_helps(message: str, flag: str) -> None:
    assert flag in str(refused(message).hint)


def test_flags_of_a_model() -> None:
    assert describe(accumulate_tokens="True").flag("accumulate_tokens")
    assert not describe(accumulate_tokens="${accumulate_tokens}").flag("accumulate_tokens")


@pytest.mark.parametrize("address", ["h:²", "h:٣", f"h:{'9' * 5000}", "h:65536", "h:0", ":8001", "a/b:1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="expected a name, or HOST:PORT"):
        Client(address)


@pytest.mark.parametrize("prompt", [[1.5], ["1"], [-1], [1 << 31], [10**400], [None], 3, None])
def test_a_prompt_that_is_none_is_refused(prompt: Any) -> None:
    with pytest.raises(UsageError, match="expected a text, or a list of token ids"):
        Client("127.0.0.1:1").ask(prompt)


@pytest.mark.parametrize(
    ("datatype", "shape", "content"),
    [
        ("INT32", [1, 2], bytes(4)),
        ("INT32", [-1], bytes(3)),
        ("INT99", [1], bytes(4)),
        ("BYTES", [2], b"\x01\0\0\0a"),
        ("FP32", [1 << 40], b""),
    ],
)
def test_an_output_that_does_not_fit_is_a_fault_of_the_server(datatype: str, shape: list[int], content: bytes) -> None:
    response = service_pb2.ModelInferResponse(raw_output_contents=[content])
    response.outputs.add(name="x", datatype=datatype, shape=shape)
    with pytest.raises(RequestError, match="not of Triton's protocol"):
        reply_of(response).outputs["x"]
    if len(content) % 4:
        with pytest.raises(RequestError, match="not of Triton's protocol"):
            reply_of(response).numbers("x")

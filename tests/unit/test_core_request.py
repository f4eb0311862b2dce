"""Tensors become executor requests, in every release of the interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtserve.nvidia.releases import RELEASES
from trtserve.programs.core.request import RequestFactory, most_ids, vocabulary_to_wrap
from trtserve.programs.core.settings import ExecutorModule, load_executor_module
from trtserve.programs.shared.parameters import ModelParameters

ROW = {
    "input_ids": np.array([[1, 5, 6, 7]], dtype=np.int32),
    "input_lengths": np.array([3], dtype=np.int32),
    "request_output_len": np.array([9], dtype=np.int32),
}


def one(value: Any, dtype: Any) -> Any:
    return np.array([value], dtype=dtype)


def requests(release: str = "1.2", decoupled: bool = True, **inputs: Any) -> Any:
    executor = load_executor_module("openvino", release)
    return RequestFactory(executor, decoupled=decoupled, exclude_input=False).requests({**ROW, **inputs})


@pytest.mark.parametrize("release", RELEASES)
def test_sampling_inputs_in_every_release(release: str) -> None:
    (request,) = requests(
        release,
        runtime_top_k=one(4, np.int32),
        runtime_top_p=one(0.5, np.float32),
        temperature=one(0.7, np.float32),
        min_length=one(2, np.int32),
        random_seed=one(2**63, np.uint64),
        len_penalty=one(1.0, np.float32),
        streaming=one(True, np.bool_),
        **({"num_return_sequences": one(1, np.int32)} if release >= "0.14" else {}),
    )
    sampling = request.sampling_config
    assert request.input_token_ids == [1, 5, 6]
    assert request.streaming
    assert sampling.top_k == 4
    assert sampling.top_p == pytest.approx(0.5)
    assert getattr(sampling, "min_tokens" if release != "0.12" else "min_length") == 2
    assert getattr(request, "max_tokens" if release != "0.12" else "max_new_tokens") == 9


def test_neutral_values() -> None:
    (request,) = requests(
        runtime_top_p=one(0.0, np.float32),
        beam_width=one(0, np.int32),
        stop_words_list=np.zeros((1, 2, 0), dtype=np.int32),
        bad_words_list=np.array([[[0], [-1]]], dtype=np.int32),
        embedding_bias=np.zeros((1, 0), dtype=np.float32),
        draft_input_ids=np.zeros((1, 0), dtype=np.int32),
    )
    assert request.sampling_config.top_p is None
    assert request.sampling_config.beam_width == 1
    assert request.stop_words is None
    assert request.bad_words is None
    assert request.embedding_bias is None


def test_images_of_a_request_are_bounded() -> None:
    factory = RequestFactory(load_executor_module("vllm", "1.2"), decoupled=True, exclude_input=False)
    files = np.array([[b"GIF89a"] * 65], dtype=np.object_)
    assert len(factory.requests({**ROW, "images": files[:, :64]})[0].images) == 64
    with pytest.raises(ValueError, match="65 files; at most 64"):
        factory.requests({**ROW, "images": files})


def test_rows_of_a_batch() -> None:
    found = requests(
        input_ids=np.array([[1, 2, 3], [4, 5, 0]], dtype=np.int32),
        input_lengths=np.array([3, 2], dtype=np.int32),
        request_output_len=np.array([[6], [7]], dtype=np.int32),
        stop_words_list=np.array([[[5, 7, 8], [1, 3, -1]], [[9, 0, 0], [1, -1, -1]]], dtype=np.int32),
    )
    assert [request.input_token_ids for request in found] == [[1, 2, 3], [4, 5]]
    assert [request.max_tokens for request in found] == [6, 7]
    assert [request.stop_words for request in found] == [[[5], [7, 8]], [[9]]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": np.zeros((1, 0), dtype=np.int32)}, "Invalid format for input_ids"),
        ({"beam_width": np.array([1, 2], dtype=np.int32)}, "beam_width has shape"),
        ({"temperature": np.array([[1, 2]], dtype=np.float32)}, "Expected a scalar tensor for tensor temperature"),
        ({"min_length": one(1, np.int32), "min_tokens": one(2, np.int32)}, "min_tokens 2 and min_length 1"),
        ({"stop_words_list": np.array([[[1, 2], [2, 1]]], dtype=np.int32)}, "stop_words_list has offsets"),
        ({"stop_words_list": np.array([[[1, 2], [3, -1]]], dtype=np.int32)}, "stop_words_list has offsets"),
        ({"stop_words_list": np.array([[1, 2]], dtype=np.int32)}, r"expected \[batch, 2, n\]"),
        ({"guided_decoding_guide_type": one(b"xml", np.object_)}, "guided_decoding_guide_type is 'xml'"),
        (
            {"guided_decoding_guide_type": one(b"json", object), "guided_decoding_guide": one(b"not json", object)},
            "allows any JSON and takes no guided_decoding_guide",
        ),
        ({"input_lengths": one(-1, np.int32)}, "input_lengths is -1; expected 1 … 4"),
        ({"input_lengths": one(0, np.int32)}, "input_lengths is 0; expected 1 … 4"),
        ({"input_lengths": one(9, np.int32)}, "input_lengths is 9; expected 1 … 4"),
        (
            {"guided_decoding_guide_type": one([b"regex"], object), "guided_decoding_guide": one([b"a\xff"], object)},
            "guided_decoding_guide is not valid UTF-8: invalid start byte at byte 1",
        ),
    ],
)
def test_bad_inputs_are_named(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requests(**inputs)


@pytest.mark.parametrize("value", [np.nan, -3.0, 3.0])
def test_a_top_p_that_is_no_probability_is_refused(value: float) -> None:
    with pytest.raises(RuntimeError, match=f"top_p is {value}"):
        requests(runtime_top_p=one(value, np.float32))


@pytest.mark.parametrize("name", ["streaming", "num_return_sequences"])
def test_several_answers_need_the_decoupled_policy(name: str) -> None:
    value = one(True, np.bool_) if name == "streaming" else one(2, np.int32)
    with pytest.raises(ValueError, match="decoupled"):
        requests(decoupled=False, **{name: value})


@pytest.mark.needs("torch")
def test_bfloat16_reaches_an_executor_that_takes_torch_tensors() -> None:
    import torch

    executor = ExecutorModule(None, (1, 2), torch)
    table = torch.arange(6).reshape(1, 2, 3).to(torch.bfloat16)
    array = executor.bfloat16_array(torch.utils.dlpack.to_dlpack(table))
    assert array.shape == (1, 2, 3)
    assert torch.equal(executor.as_tensor(array[0]), table[0])


@pytest.mark.needs("torch")
@pytest.mark.parametrize("shape", [(1, 2, 3), (4,), (0, 3)])
def test_bfloat16_becomes_float32_for_the_embedded_executor(shape: tuple[int, ...]) -> None:
    import torch

    executor = load_executor_module("openvino", "1.2")
    table = (torch.arange(int(np.prod(shape))) * -0.37).reshape(shape).to(torch.bfloat16)
    array = executor.bfloat16_array(torch.utils.dlpack.to_dlpack(table))
    assert array.dtype == np.float32
    assert np.array_equal(array, table.float().numpy())
    with pytest.raises(ValueError, match="not a BF16 tensor"):
        executor.bfloat16_array(torch.utils.dlpack.to_dlpack(table.float()))


def test_several_sequences_of_beams_are_one_response() -> None:
    (request,) = requests(decoupled=False, beam_width=one(3, np.int32), num_return_sequences=one(2, np.int32))
    assert request.sampling_config.num_return_sequences == 2


def test_two_names_of_one_setting_may_agree() -> None:
    (request,) = requests(seed=one(3, np.uint64), random_seed=one(3, np.uint64))
    assert request.sampling_config.seed == 3


def test_ids_outside_the_vocabulary_are_wrapped_on_request() -> None:
    """As benchmark_core_model.py sends them; the ids of a prompt table's rows are kept."""
    executor = load_executor_module("openvino", "1.2")
    factory = RequestFactory(executor, decoupled=True, exclude_input=False, vocabulary=100)
    ids = {"input_ids": np.array([[5, 2**31 - 2, 100]], dtype=np.int32)}
    (request,) = factory.requests({**ROW, **ids})
    assert request.input_token_ids == [5, (2**31 - 2) % 100, 0]
    table = {"prompt_embedding_table": np.zeros((1, 2, 4), dtype=np.float16)}
    (request,) = factory.requests({**ROW, "input_ids": np.array([[5, 100, 101]], dtype=np.int32), **table})
    assert request.input_token_ids == [5, 100, 101]


def test_the_size_to_wrap_by_is_the_engines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_config": {"vocab_size": 320}}))

    def size(word: str) -> int | None:
        config = {"parameters": {"out_of_vocabulary_ids": {"string_value": word}}}
        return vocabulary_to_wrap(ModelParameters(config, tmp_path, print), tmp_path)

    assert [size("wrap"), size("refuse"), size("")] == [320, None, None]
    with pytest.raises(ValueError, match="expected refuse or wrap"):
        size("clip")


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("input_ids", {"input_lengths": one(9, np.int32)}),
        ("draft_input_ids", {"draft_input_ids": np.zeros((1, 9), dtype=np.int32)}),
        ("retention_token_range_starts", {"retention_token_range_starts": np.zeros((1, 9), dtype=np.int32)}),
    ],
)
def test_more_ids_than_a_sequence_has_are_refused_by_their_count(name: str, inputs: Any) -> None:
    executor = load_executor_module("openvino", "1.2")
    factory = RequestFactory(executor, decoupled=True, exclude_input=False, longest=8)
    ids = {"input_ids": np.ones((1, 9), dtype=np.int32)}
    ids |= {} if name == "input_ids" else {"input_lengths": one(8, np.int32)}
    with pytest.raises(ValueError, match=f"^{name} has 9 ids, which exceeds maximum input length: at most 8 are"):
        factory.requests({**ROW, **ids, **inputs})


def test_the_most_ids_is_the_engines(tmp_path: Path) -> None:
    assert most_ids(tmp_path) == 2**20
    for longest, most in ((320, 2**17), (2**18, 2**18)):
        (tmp_path / "config.json").write_text(json.dumps({"build_config": {"max_seq_len": longest}}))
        assert most_ids(tmp_path) == most

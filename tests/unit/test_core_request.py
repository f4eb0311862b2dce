"""The core model's mapping of tensors to executor requests, in every release of the interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.model_modules import load
from trtserve.releases import RELEASES

ROW = {
    "input_ids": np.array([[1, 5, 6, 7]], dtype=np.int32),
    "input_lengths": np.array([3], dtype=np.int32),
    "request_output_len": np.array([9], dtype=np.int32),
}


def one(value: Any, dtype: Any) -> Any:
    return np.array([value], dtype=dtype)


def requests(monkeypatch: pytest.MonkeyPatch, release: str = "1.2", decoupled: bool = True, **inputs: Any) -> Any:
    executor = load(monkeypatch, "tensorrt_llm", "executor_module").load_executor_module("openvino", release)
    factory = load(monkeypatch, "tensorrt_llm", "core_request").RequestFactory
    return factory(executor, decoupled=decoupled, exclude_input=False).requests({**ROW, **inputs})


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_takes_the_sampling_inputs(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    (request,) = requests(
        monkeypatch,
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


def test_neutral_values(monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = requests(
        monkeypatch,
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


def test_rows_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = requests(
        monkeypatch,
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
        ({"input_lengths": one(-1, np.int32)}, "input_lengths is -1; expected 1 … 4"),
        ({"input_lengths": one(0, np.int32)}, "input_lengths is 0; expected 1 … 4"),
        ({"input_lengths": one(9, np.int32)}, "input_lengths is 9; expected 1 … 4"),
        (
            {"guided_decoding_guide_type": one([b"regex"], object), "guided_decoding_guide": one([b"a\xff"], object)},
            "guided_decoding_guide is not valid UTF-8: invalid start byte at byte 1",
        ),
    ],
)
def test_bad_inputs_are_named(monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requests(monkeypatch, **inputs)


def test_a_nucleus_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="top_p is nan"):
        requests(monkeypatch, runtime_top_p=one(np.nan, np.float32))


@pytest.mark.parametrize("name", ["streaming", "num_return_sequences"])
def test_one_response_policy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    value = one(True, np.bool_) if name == "streaming" else one(2, np.int32)
    with pytest.raises(ValueError, match="decoupled"):
        requests(monkeypatch, decoupled=False, **{name: value})


@pytest.mark.oracle
def test_bfloat16_reaches_an_executor_that_takes_torch_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    module = load(monkeypatch, "tensorrt_llm", "executor_module")
    executor = module.ExecutorModule(None, (1, 2), torch)
    table = torch.arange(6).reshape(1, 2, 3).to(torch.bfloat16)
    array = executor.bfloat16_array(torch.utils.dlpack.to_dlpack(table))
    assert array.shape == (1, 2, 3)
    assert torch.equal(executor.as_tensor(array[0]), table[0])


@pytest.mark.oracle
@pytest.mark.parametrize("shape", [(1, 2, 3), (4,), (0, 3)])
def test_bfloat16_becomes_float32_for_the_embedded_executor(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    torch = pytest.importorskip("torch")
    executor = load(monkeypatch, "tensorrt_llm", "executor_module").load_executor_module("openvino", "1.2")
    table = (torch.arange(int(np.prod(shape))) * -0.37).reshape(shape).to(torch.bfloat16)
    array = executor.bfloat16_array(torch.utils.dlpack.to_dlpack(table))
    assert array.dtype == np.float32
    assert np.array_equal(array, table.float().numpy())
    with pytest.raises(ValueError, match="no BF16 tensor"):
        executor.bfloat16_array(torch.utils.dlpack.to_dlpack(table.float()))


def test_several_sequences_of_beams_are_one_response(monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = requests(
        monkeypatch, decoupled=False, beam_width=one(3, np.int32), num_return_sequences=one(2, np.int32)
    )
    assert request.sampling_config.num_return_sequences == 2


def test_equal_synonyms_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    (request,) = requests(monkeypatch, seed=one(3, np.uint64), random_seed=one(3, np.uint64))
    assert request.sampling_config.seed == 3

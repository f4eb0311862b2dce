"""Weight-only quantisation: rounding, and products with the packed weights in OpenVINO."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset13 as ops

from tests.support.reference_decoder import ReferenceDecoder
from tests.support.tiny_decoders import DECODERS
from trtserve.checkpoint.quantized import Int4Weight, group_size
from trtserve.executor.openvino.graph import build_graph
from trtserve.executor.openvino.graph_parts import int4_matrix
from trtserve.executor.openvino.paged_model import activation_group, openvino_core
from trtserve.executor.openvino.weight_quantization import quantize_in_groups, quantize_per_channel
from trtserve.executor.reference_model import ReferenceModel

Floats = npt.NDArray[np.float32]


def test_quantisation_is_symmetric_per_output_channel() -> None:
    weight = np.array([[0.5, -1.0, 0.25], [0.0, 0.0, 0.0], [3.0, 1.0, 2.0]], dtype=np.float32)
    values, scales = quantize_per_channel(weight)
    assert values.dtype == np.int8
    assert scales.shape == (3, 1)
    np.testing.assert_array_equal(values[1], 0)
    np.testing.assert_array_equal(np.abs(values).max(axis=1), [127, 0, 127])
    assert (np.abs(values * scales - weight) <= scales / 2 + 1e-7).all()


def _relative_error(weight: Floats, group: int) -> float:
    difference = quantize_in_groups(weight, group).dequantized() - weight
    return float(np.sqrt(np.square(difference).mean() / np.square(weight).mean()))


def test_int4_uses_the_whole_range() -> None:
    codes = np.array([[-8, 7, 3, 0], [8, -7, -3, 1], [0, 0, 0, 0]], np.float32)
    weight = quantize_in_groups(codes * np.float32(0.5), 4)
    np.testing.assert_array_equal(weight.dequantized(), codes * np.float32(0.5))
    assert weight.zero_points is None
    assert weight.codes.max() <= 15
    # The number with the largest absolute value gets code 0, whatever its sign.
    np.testing.assert_array_equal(weight.codes[:2].min(axis=1), 0)


def test_int4_error_falls_with_smaller_groups() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    errors = [_relative_error(weight, group) for group in (256, 128, 64, 32)]
    assert all(wide > narrow for wide, narrow in pairwise(errors))
    assert errors[1] < 0.1
    plain = np.abs(weight.reshape(64, 4, 128)).max(axis=-1, keepdims=True) / 7
    rounded = np.rint(weight.reshape(64, 4, 128) / plain) * plain
    assert errors[1] < 0.85 * np.sqrt(np.square(rounded - weight.reshape(64, 4, 128)).mean())


def test_quantising_in_pieces_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(1).standard_normal((37, 64)).astype(np.float32)
    whole, (values, scales) = quantize_in_groups(weight, 32), quantize_per_channel(weight)
    monkeypatch.setattr("trtserve.executor.openvino.weight_quantization._PIECE", 640)
    pieces, (piece_values, piece_scales) = quantize_in_groups(weight, 32), quantize_per_channel(weight)
    np.testing.assert_array_equal(pieces.codes, whole.codes)
    np.testing.assert_array_equal(pieces.scales, whole.scales)
    np.testing.assert_array_equal(piece_values, values)
    np.testing.assert_array_equal(piece_scales, scales)


def test_quantisation_needs_little_extra_memory() -> None:
    weight = np.zeros((16384, 1024), np.float16)
    for pack in (quantize_per_channel, lambda values: quantize_in_groups(values, 128)):
        tracemalloc.start()
        packed = pack(weight)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del packed
        assert peak < weight.size * 1.1 + 60 * 2**20


@pytest.mark.parametrize(("inputs", "expected"), [(2048, 256), (5632, 256), (896, 128), (576, 64), (96, 32), (20, 20)])
def test_groups_divide_the_inputs(inputs: int, expected: int) -> None:
    assert group_size(inputs) == expected


@pytest.mark.parametrize("zeros", [None, 15, 16], ids=["symmetric", "zero points", "a zero point of 16"])
def test_products_with_int4_matrices_are_exact(zeros: int | None) -> None:
    random = np.random.default_rng(2)
    weight = Int4Weight(
        codes=random.integers(0, 16, (48, 64), dtype=np.uint8),
        scales=random.uniform(0.5, 2, (48, 2)).astype(np.float32),
        zero_points=None if zeros is None else random.integers(0, zeros, (48, 2), np.uint8, endpoint=True),
        group_size=32,
    )
    if weight.zero_points is not None and zeros is not None:
        weight.zero_points[0, 0] = zeros
    inputs = ops.parameter(ov.PartialShape([-1, 64]), ov.Type.f32)
    product = ops.matmul(inputs, int4_matrix(weight, "weight"), False, True)
    graph = ov.Model([ops.result(product)], [inputs], "product")
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    request = openvino_core().compile_model(graph, "CPU", exact).create_infer_request()
    states = random.standard_normal((3, 64)).astype(np.float32)
    np.testing.assert_allclose(request.infer([states])[0], states @ weight.dequantized().T, rtol=2e-5, atol=2e-4)


def test_input_scales_apply_to_the_activations() -> None:
    """As in ModelOpt's AWQ, the rest of the decoder stays float."""
    tiny = DECODERS["llama"]
    names = ("transformer.layers.0.attention.qkv.weight", "transformer.layers.1.mlp.proj.weight")
    random = np.random.default_rng(3)
    matrices = {}
    for name in names:
        made = quantize_in_groups(tiny.tensors[name], 32)
        matrices[name] = replace(made, input_scales=random.uniform(0.5, 2, made.codes.shape[1]).astype(np.float32))
    ids = random.integers(0, tiny.sizes.vocab, 23).tolist()
    packed = replace(tiny, int4_matrices=matrices)
    logits = ReferenceModel(tiny.decoder, tiny.sizes, packed, threads=1).logits(ids)
    tensors = {**tiny.tensors, **{name: weight.dequantized() for name, weight in matrices.items()}}
    np.testing.assert_allclose(logits, ReferenceDecoder(tiny.decoder, tiny.sizes, tensors).logits(ids), atol=2e-4)


@pytest.mark.parametrize(("name", "expected"), [("llama, int4", 32), ("llama, int8", 256), ("llama, float16", 256)])
def test_activation_groups_divide_the_weight_groups(name: str, expected: int) -> None:
    tiny = DECODERS[name]
    assert activation_group(build_graph(tiny.decoder, tiny.sizes, tiny, packing=tiny.packing)) == expected


def test_activations_stay_exact_for_unsupported_weight_groups() -> None:
    made = quantize_in_groups(np.ones((4, 20), np.float32), 20)
    inputs = ops.parameter(ov.PartialShape([-1, 20]), ov.Type.f32)
    product = ops.matmul(inputs, int4_matrix(made, "weight"), False, True)
    assert activation_group(ov.Model([ops.result(product)], [inputs], "product")) == 0

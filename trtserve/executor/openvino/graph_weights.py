"""Constants for matrices that stay packed in the plugin: floats, int8 per channel, int4 in groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from trtserve.checkpoint.quantized import Int4Weight, group_size
from trtserve.executor.openvino.graph_operations import constant, decompressed, integers
from trtserve.executor.openvino.weight_quantization import Packing, quantize_in_groups, quantize_per_channel

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

_ZERO = 8
_LARGEST_U4 = 15


def packed(values: Array, name: str, packing: Packing) -> Any:
    """Return the matrix `values` [..., in] as float32 [first dimension, rest], from a constant `name` with `packing`.

    int8 has a scale for each row [in], also with three dimensions; int4 one for each group of its inputs.
    """
    if packing == "int4":
        flat = values.reshape(len(values), -1)
        return int4_matrix(quantize_in_groups(flat, group_size(values.shape[-1])), name)
    if packing == "int8":
        quantised, scales = quantize_per_channel(values)
        widened = ops.convert(constant(quantised, name), "f32")
        scaled = ops.multiply(widened, constant(scales, f"{name}.per_channel_scale"))
        return scaled if values.ndim == 2 else ops.reshape(scaled, integers(len(values), -1), False)
    return float_tensor(values if values.ndim < 3 else values.reshape(len(values), -1), name)


def float_tensor(values: Array, name: str) -> Any:
    """Return the constant `name` in the type of `values`, widened to float32."""
    stored = constant(values, name)
    return decompressed(stored) if stored.get_element_type() != ov.Type.f32 else stored


def int4_matrix(weight: Int4Weight, name: str) -> Any:
    """Return the matrix [out, in] without its `input_scales`: (codes − zero points) × scales per group of inputs.

    The CPU plugin recognises this order of operations as one packed weight. Without zero points the codes are signed
    (i4), which needs no subtraction.
    """
    outputs, inputs = weight.codes.shape
    groups = [outputs, inputs // weight.group_size]
    grouped = [*groups, weight.group_size]
    if weight.zero_points is None:
        # 0 … 15 minus 8 in two's complement: the highest of the four bits flips.
        widened = ops.convert(_nibbles(weight.codes ^ np.uint8(_ZERO), grouped, ov.Type.i4, name), "f32")
    else:
        codes = _nibbles(weight.codes, grouped, ov.Type.u4, name)
        zeros = _zero_points(weight.zero_points.reshape(*groups, 1), f"{name}.zero_points")
        widened = ops.subtract(ops.convert(codes, "f32"), ops.convert(zeros, "f32"))
    scales = constant(weight.scales.reshape(*groups, 1), f"{name}.group_scale")
    return ops.reshape(ops.multiply(widened, scales), integers(outputs, inputs), False)


def _zero_points(points: Bytes, name: str) -> Any:
    """Return the zero points as u4 if they fit; GPTQ's 16 does not."""
    if points.max() > _LARGEST_U4 or points.size % 2:
        return constant(points, name)
    return _nibbles(points, list(points.shape), ov.Type.u4, name)


def _nibbles(values: Bytes, shape: list[int], kind: ov.Type, name: str) -> Any:
    """Return the constant `name` of four-bit `values`, two per byte, the first one in the low bits."""
    flat = values.reshape(-1)
    tensor = ov.Tensor(kind, ov.Shape(shape))
    memory = tensor.data.view(np.uint8).reshape(-1)
    memory[: flat.size // 2] = flat[0 : flat.size - 1 : 2] | (flat[1::2] << 4)
    if flat.size % 2:
        memory[-1] = flat[-1]
    made = ov.op.Constant(tensor, shared_memory=True)
    made.set_friendly_name(name)
    return made

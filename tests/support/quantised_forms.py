"""Matrices in the published forms that are read as floats, each written number by number as its format says.

`quantise` returns the tensors of a matrix [out, in] by their endings, and the float32 that they stand for. Sources: the
READMEs and documentation of compressed-tensors, AutoGPTQ, AutoAWQ, bitsandbytes and ModelOpt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Parts = tuple[dict[str, Array], Array]

_FP8 = ml_dtypes.float8_e4m3fn
# e2m1 by its bits: (−1)^sign · (1 + mantissa / 2) · 2^(exponent − 1), and half the mantissa where the exponent is 0.
E2M1 = [
    (-1.0) ** (code >> 3)
    * ((code & 1) / 2 if not code >> 1 & 3 else (1 + (code & 1) / 2) * 2.0 ** ((code >> 1 & 3) - 1))
    for code in range(16)
]


@dataclass(frozen=True, kw_only=True)
class Form:
    """A published form: its quantization_config, and how a matrix is stored."""

    config: dict[str, Any]
    quantise: Callable[[Array], Parts]


def pack_in_order(codes: Array) -> Array:
    """[n, m] codes as [n, m / 8] numbers, neighbours together."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for place in range(8):
        words |= codes[:, place::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def _spread(scales: Array, shape: tuple[int, ...], block: tuple[int, int]) -> Array:
    """Every weight's scale, looked up one by one."""
    rows, columns = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    spread: Array = np.asarray(scales, np.float32)[np.ix_(rows, columns)]
    return spread


def fp8(
    block: tuple[int, int], ending: str = "weight_scale", kind: Any = np.float32, shape: Any = None, **beside: Array
) -> Callable[[Array], Parts]:
    """FP8 with a scale per block; 0 is the whole side."""

    def quantise(weight: Array) -> Parts:
        height, width = block[0] or len(weight), block[1] or weight.shape[1]
        blocks = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
        scales = np.empty(blocks, np.float32)
        for i in range(blocks[0]):
            for j in range(blocks[1]):
                part = weight[i * height : (i + 1) * height, j * width : (j + 1) * width]
                scales[i, j] = np.abs(part).max() / 448
        if kind is np.uint8:
            exponents = np.ceil(np.log2(scales)).astype(int)
            stored, scales = (exponents + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu), 2.0**exponents
        else:
            stored = scales.astype(kind)
            scales = stored.astype(np.float32)
        wide = _spread(scales, weight.shape, (height, width))
        codes = np.clip(weight / wide, -448, 448).astype(_FP8)
        stored = stored if shape is None else stored.reshape(shape)
        return {"weight": codes, ending: stored} | beside, codes.astype(np.float32) * wide

    return quantise


def int8(group: int, *, zeros: bool = False, whole: bool = False) -> Callable[[Array], Parts]:
    """W8A8 and its relatives: a scale per group of inputs (0: per row), or one for the matrix."""

    def quantise(weight: Array) -> Parts:
        size = group or weight.shape[1]
        groups = weight.reshape(len(weight), -1, size)
        scales = (np.abs(groups).max(-1) / 100).astype(np.float32)
        if whole:
            scales[:] = scales.max()
        points = np.arange(scales.size).reshape(scales.shape) % 23 - 11 if zeros else np.zeros(scales.shape, int)
        wide, shift = (np.repeat(each, size, 1) for each in (scales, points))
        codes = np.clip(np.rint(weight / wide) + shift, -128, 127).astype(np.int8)
        parts = {"weight": codes, "weight_scale": scales[:1, :1].reshape(1) if whole else scales}
        if zeros:
            parts["weight_zero_point"] = points.astype(np.int8)
        return parts, (codes - shift).astype(np.float32) * wide

    return quantise


def words(codes: Array, bits: int) -> Array:
    """[n, m] codes as [n, m · bits / 32] numbers, lowest bits first, bit by bit."""
    stream = ((codes[:, :, None].astype(int) >> np.arange(bits)) & 1).reshape(len(codes), -1, 32)
    numbers: Array = (stream.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)
    return numbers.view(np.int32)


def _codes(weight: Array, order: Array, bits: int, *, zeros: bool, highest: int) -> tuple[Array, Array, Array]:
    """Codes [out, in], zero points and scales float16 [out, groups], where input k has the group order[k]."""
    groups, middle = int(order.max()) + 1, 1 << (bits - 1)
    scales, points = np.empty((len(weight), groups), np.float16), np.full((len(weight), groups), middle)
    for each in range(groups):
        scales[:, each] = np.abs(weight[:, order == each]).max(1) / (middle - 0.5)
        if zeros:
            points[:, each] = 1 + (np.arange(len(weight)) * 5 + each * 3) % highest
    wide, shift = scales.astype(np.float32)[:, order], points[:, order]
    codes = np.clip(np.rint(weight / wide) + shift, 0, (1 << bits) - 1).astype(int)
    return codes, points, scales


def packed(bits: int, group: int, *, zeros: bool = False, ordered: bool = False) -> Callable[[Array], Parts]:
    """compressed-tensors, pack-quantized; zero points are packed along the outputs."""

    def quantise(weight: Array) -> Parts:
        inputs = weight.shape[1]
        order = np.arange(inputs) // (group or inputs)
        order = np.random.default_rng(5).permutation(order) if ordered else order
        codes, points, scales = _codes(weight, order, bits, zeros=zeros, highest=(1 << bits) - 1)
        parts = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if zeros:
            parts["weight_zero_point"] = words(points.T, bits).T
        if ordered:
            parts["weight_g_idx"] = order.astype(np.int32)
        return parts, (codes - points[:, order]).astype(np.float32) * scales.astype(np.float32)[:, order]

    return quantise


def gptq(bits: int, group: int, *, less: int = 1, ordered: bool = True) -> Callable[[Array], Parts]:
    """AutoGPTQ; with `less` 0 zero points are stored as they are (gptq_v2)."""

    def quantise(weight: Array) -> Parts:
        inputs = weight.shape[1]
        order = np.arange(inputs) // (group or inputs)
        order = np.random.default_rng(5).permutation(order) if ordered else order
        codes, points, scales = _codes(weight, order, bits, zeros=True, highest=(1 << bits) - 1)
        parts = {
            "qweight": words(codes, bits).T,
            "qzeros": words((points - less).T, bits),
            "scales": scales.T.copy(),
            "g_idx": order.astype(np.int32),
        }
        value = (codes - points[:, order]).astype(np.float32) * scales.astype(np.float32)[:, order]
        return {ending: np.ascontiguousarray(part) for ending, part in parts.items()}, value

    return quantise


def awq_rows(weight: Array) -> Parts:
    """AutoAWQ with one group: eight outputs in a number, in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    codes, points, scales = _codes(weight, np.zeros(weight.shape[1], int), 4, zeros=True, highest=15)
    mixed = np.arange(len(weight)).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    parts = {"qweight": words(codes.T[:, mixed], 4), "qzeros": words(points.T[:, mixed], 4), "scales": scales.T.copy()}
    return parts, (codes - points).astype(np.float32) * scales.astype(np.float32)


def nvfp4(*, ending: str, overall: str, divides: bool) -> Callable[[Array], Parts]:
    """e2m1 with an FP8 scale for 16 inputs and one float for the matrix."""

    def quantise(weight: Array) -> Parts:
        groups = weight.reshape(len(weight), -1, 16)
        whole = np.float32(2.0**-9)
        scales = np.maximum(np.abs(groups).max(-1) / 6 / whole, 0.02).astype(_FP8)
        wide = scales.astype(np.float32) * whole
        codes = np.abs(groups[..., None] / wide[..., None, None] - np.asarray(E2M1, np.float32)).argmin(-1)
        value = np.asarray(E2M1, np.float32)[codes] * wide[..., None]
        flat = codes.reshape(len(weight), -1).astype(np.uint8)
        parts = {
            ending: flat[:, 0::2] | flat[:, 1::2] << 4,
            "weight_scale": scales,
            overall: np.full(1 if divides else (), 1 / whole if divides else whole, np.float32),
            "input_scale" if ending == "weight" else "input_global_scale": np.ones(1, np.float32),
        }
        return parts, value.reshape(weight.shape)

    return quantise


def bitsandbytes(kind: str, *, nested: bool) -> Callable[[Array], Parts]:
    """Two codes in a byte, the first in the high bits, and the largest number of every 64."""
    values = np.sort(np.random.default_rng(2).normal(size=16)).astype(np.float32)
    values /= np.abs(values).max()

    def quantise(weight: Array) -> Parts:
        blocks = weight.reshape(-1, 64)
        largest = np.abs(blocks).max(1).astype(np.float32)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float16", "shape": list(weight.shape)}
        parts = {"weight.quant_map": values}
        if nested:
            table = np.linspace(-1, 1, 256, dtype=np.float32)
            offset, inner = np.float32(0.03), np.arange(len(largest)) // 256
            outer = np.array(
                [np.abs(largest[inner == each] - offset).max() for each in range(inner[-1] + 1)], np.float32
            )
            codes = np.abs(((largest - offset) / outer[inner])[:, None] - table).argmin(1).astype(np.uint8)
            largest = table[codes] * outer[inner] + offset
            parts |= {"weight.absmax": codes, "weight.nested_absmax": outer, "weight.nested_quant_map": table}
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        else:
            parts["weight.absmax"] = largest
        codes = np.abs((blocks / largest[:, None])[..., None] - values).argmin(-1).astype(np.uint8).reshape(-1)
        parts["weight"] = (codes[0::2] << 4 | codes[1::2])[:, None]
        text = json.dumps(state).encode()
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, np.uint8)
        return parts, (values[codes].reshape(blocks.shape) * largest[:, None]).reshape(weight.shape)

    return quantise


def bitsandbytes_int8(weight: Array) -> Parts:
    largest = np.abs(weight).max(1).astype(np.float32)
    codes = np.rint(weight / largest[:, None] * 127).astype(np.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
    return parts, codes.astype(np.float32) * largest[:, None] * np.float32(1 / 127)


def _compressed(layout: str, bits: int, strategy: str, kind: str = "int", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "dynamic": False, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _gptq(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": True, "sym": False} | more


_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
_SMALL = _BLOCKS | {"weight_block_size": [48, 80]}
_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
_V2 = {"checkpoint_format": "gptq_v2"}

FORMS: dict[str, Form] = {
    "fp8, blocks of 128": Form(config=_BLOCKS, quantise=fp8((128, 128), "weight_scale_inv", ml_dtypes.bfloat16)),
    "fp8, blocks that end early": Form(config=_SMALL, quantise=fp8((48, 80), "weight_scale_inv")),
    "fp8, blocks with exponents": Form(config=_BLOCKS, quantise=fp8((128, 128), "weight_scale_inv", np.uint8)),
    "fp8, dynamic": Form(
        config={"quant_method": "fp8", "activation_scheme": "dynamic"}, quantise=fp8((0, 0), shape=())
    ),
    "fbgemm_fp8": Form(
        config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        quantise=fp8((1, 0), input_scale_ub=np.ones(1, np.float32)),
    ),
    "compressed-tensors, float by channel": Form(
        config=_compressed("float-quantized", 8, "channel", "float"), quantise=fp8((1, 0), kind=ml_dtypes.bfloat16)
    ),
    "compressed-tensors, float by tensor, dynamic": Form(
        config=_compressed("float-quantized", 8, "tensor", "float"), quantise=fp8((0, 0), shape=(1,))
    ),
    "compressed-tensors, float by block": Form(
        config=_compressed("float-quantized", 8, "block", "float", block_structure=[128, 128]),
        quantise=fp8((128, 128)),
    ),
    "compressed-tensors, naive float": Form(
        config=_compressed("naive-quantized", 8, "channel", "float"), quantise=fp8((1, 0))
    ),
    "modelopt, FP8_PB_WO": Form(
        config={"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, quantise=fp8((128, 128))
    ),
    "modelopt, FP8_PER_CHANNEL_PER_TOKEN": Form(
        config={"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        quantise=fp8((1, 0), shape=(-1,)),
    ),
    "compressed-tensors, W8A8 by channel": Form(config=_compressed("int-quantized", 8, "channel"), quantise=int8(0)),
    "compressed-tensors, W8A8 by tensor": Form(
        config=_compressed("int-quantized", 8, "tensor"), quantise=int8(0, whole=True)
    ),
    "compressed-tensors, W8A8 with zero points": Form(
        config=_compressed("int-quantized", 8, "channel", symmetric=False), quantise=int8(0, zeros=True)
    ),
    "compressed-tensors, int8 in groups": Form(
        config=_compressed("naive-quantized", 8, "group", group_size=32), quantise=int8(32)
    ),
    "compressed-tensors, W4A16": Form(config=_compressed("pack-quantized", 4, "group"), quantise=packed(4, 64)),
    "compressed-tensors, W4A16 with zero points": Form(
        config=_compressed("pack-quantized", 4, "group", symmetric=False), quantise=packed(4, 64, zeros=True)
    ),
    "compressed-tensors, W4A16 by channel": Form(
        config=_compressed("pack-quantized", 4, "channel"), quantise=packed(4, 0)
    ),
    "compressed-tensors, W4A16 with actorder": Form(
        config=_compressed("pack-quantized", 4, "group", actorder="group"), quantise=packed(4, 64, ordered=True)
    ),
    "compressed-tensors, W8A16 by channel": Form(
        config=_compressed("pack-quantized", 8, "channel"), quantise=packed(8, 0)
    ),
    "compressed-tensors, W8A16 with zero points": Form(
        config=_compressed("pack-quantized", 8, "group", symmetric=False), quantise=packed(8, 64, zeros=True)
    ),
    "compressed-tensors, NVFP4": Form(
        config=_compressed("nvfp4-pack-quantized", 4, "tensor_group", "float", group_size=16),
        quantise=nvfp4(ending="weight_packed", overall="weight_global_scale", divides=True),
    ),
    "modelopt, NVFP4": Form(
        config={"quant_method": "modelopt", "quant_algo": "NVFP4"},
        quantise=nvfp4(ending="weight", overall="weight_scale_2", divides=False),
    ),
    "gptq, desc_act": Form(config=_gptq(4, 64), quantise=gptq(4, 64)),
    "gptq, desc_act, v2": Form(config=_gptq(4, 64, **_V2), quantise=gptq(4, 64, less=0)),
    "gptq, one group": Form(config=_gptq(4, -1, desc_act=False), quantise=gptq(4, 0, ordered=False)),
    "gptq, 2 bits": Form(config=_gptq(2, 64), quantise=gptq(2, 64)),
    "gptq, 3 bits": Form(config=_gptq(3, 64), quantise=gptq(3, 64)),
    "gptq, 8 bits": Form(config=_gptq(8, 64), quantise=gptq(8, 64)),
    "gptq, 8 bits, v2": Form(config=_gptq(8, 64, desc_act=False, **_V2), quantise=gptq(8, 64, less=0, ordered=False)),
    "awq, one group": Form(
        config={"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": -1, "zero_point": True},
        quantise=awq_rows,
    ),
    "bitsandbytes, nf4": Form(config=_BITSANDBYTES, quantise=bitsandbytes("nf4", nested=False)),
    "bitsandbytes, nf4, nested": Form(config=_BITSANDBYTES, quantise=bitsandbytes("nf4", nested=True)),
    "bitsandbytes, fp4": Form(config=_BITSANDBYTES, quantise=bitsandbytes("fp4", nested=False)),
    "bitsandbytes, int8": Form(
        config={"quant_method": "bitsandbytes", "load_in_8bit": True}, quantise=bitsandbytes_int8
    ),
}
CONFIGS: dict[str, dict[str, Any]] = {name: form.config for name, form in FORMS.items()}

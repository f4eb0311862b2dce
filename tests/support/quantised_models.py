"""Tiny models in the documented formats of AWQ, GPTQ and FP8 tools, with their dequantised weights.

Packing: AutoAWQ's README and `WQLinear_GEMM` (eight outputs in a number, lowest bits first: outputs 0, 2, 4, 6, 1, 3,
5, 7), AutoGPTQ's `QuantLinear` (eight inputs in a number, in order; zero points less one).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.support.quantised_forms import CONFIGS, FORMS, pack_in_order
from tests.support.tiny_models import read_safetensors, write_tiny_model

Array = npt.NDArray[Any]

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
}
EXPERT_SIZES: dict[str, Any] = {
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
    "head_dim": 64,
}
# Routers and the gates of shared experts, which no tool quantises.
ROUTERS = r"gate\.weight$"
GROUP = 64
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
_CODES = {
    "float16": "F16",
    "float32": "F32",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}

AWQ: dict[str, Any] = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
FLOAT_QUANTIZED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        }
    },
}
SCHEMES: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq_asym": GPTQ | {"sym": False},
    "gptq_v2": GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    "fp8": FP8,
    "float_quantized": FLOAT_QUANTIZED,
}


@dataclass(frozen=True, kw_only=True)
class QuantisedModel:
    """A quantised model, the same model dequantised to float32, and these weights."""

    folder: Path
    dequantised: Path
    weights: Mapping[str, Array]


def write_quantised_model(
    folder: Path, scheme: str, family: str = "llama", *, gain: float = 2.0, kept: str = ROUTERS, **overrides: Any
) -> QuantisedModel:
    """Quantise a random model of `family` by one of `SCHEMES`: groups rounded to nearest.

    Tensors whose names have the pattern `kept` stay floats.
    """
    original = write_tiny_model(folder / "original", family, dtype="float16", gain=gain, **(SIZES | overrides))
    config = json.loads((original / "config.json").read_text())
    stored: dict[str, Array] = {}
    weights: dict[str, Array] = {}
    for name, tensor in read_safetensors(original / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if ".layers." not in name or tensor.ndim != 2 or re.search(kept, name):
            stored[name], weights[name] = tensor, tensor.astype(np.float32)
            continue
        parts, weights[name] = _quantise(scheme, tensor.astype(np.float32))
        stored |= {f"{stem}.{ending}": value for ending, value in parts.items()}
    quantised = _copy(
        original, folder / "quantised", config | {"quantization_config": (SCHEMES | CONFIGS)[scheme]}, stored
    )
    plain = _copy(original, folder / "dequantised", config | {"dtype": "float32", "torch_dtype": "float32"}, weights)
    return QuantisedModel(folder=quantised, dequantised=plain, weights=weights)


def fused(model: QuantisedModel, layer: int) -> dict[str, Array]:
    """The float weights [out, in] of a layer under the checkpoint's names, fused as in one rank."""
    prefix = f"model.layers.{layer}."
    attention = [model.weights[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
    return {
        "attention.qkv": np.concatenate(attention),
        "attention.dense": model.weights[f"{prefix}self_attn.o_proj.weight"],
        "mlp.fc": model.weights[f"{prefix}mlp.gate_proj.weight"],
        "mlp.gate": model.weights[f"{prefix}mlp.up_proj.weight"],
        "mlp.proj": model.weights[f"{prefix}mlp.down_proj.weight"],
    }


def _copy(original: Path, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> Path:
    folder.mkdir()
    for path in original.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    write_any_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_any_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a safetensors file of floats, integers and FP8 numbers."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        kind = _CODES[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_any_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of such a file, taken apart by the safetensors library."""
    import safetensors

    kinds = {code: np.dtype(getattr(ml_dtypes, name, name)) for name, code in _CODES.items()}
    deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize
    return {
        name: np.frombuffer(bytes(view["data"]), dtype=kinds[view["dtype"]]).reshape(view["shape"])
        for name, view in deserialize(path.read_bytes())
    }


def _quantise(scheme: str, weight: Array) -> tuple[dict[str, Array], Array]:
    if scheme in FORMS:
        return FORMS[scheme].quantise(weight)
    if scheme in ("fp8", "float_quantized"):
        return _fp8(weight, scalar=scheme == "fp8")
    symmetric = scheme == "gptq"
    codes, zeros, scales = _rounded(
        weight, symmetric=symmetric, highest_zero=15 if scheme in ("awq", "gptq_v2") else 16
    )
    steps = (codes - np.repeat(zeros, GROUP, 1)).astype(np.float32)
    value = steps * np.repeat(scales.astype(np.float32), GROUP, 1)
    if scheme == "awq":
        parts = {"qweight": pack_awq(codes.T), "qzeros": pack_awq(zeros.T)}
    else:
        stored = zeros if scheme == "gptq_v2" else zeros - 1
        order = np.arange(weight.shape[1], dtype=np.int32) // GROUP
        parts = {"qweight": pack_in_order(codes).T, "qzeros": pack_in_order(stored.T), "g_idx": order}
    return parts | {"scales": scales.T.copy()}, value


def _rounded(weight: Array, *, symmetric: bool, highest_zero: int) -> tuple[Array, Array, Array]:
    """Codes [out, in], zero points and float16 scales [out, in / GROUP]."""
    groups = weight.reshape(len(weight), -1, GROUP)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    if symmetric:
        scales = (np.maximum(-low, high) / 7).astype(np.float16)
        zeros = np.full(scales.shape, 8)
    else:
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 1, highest_zero).astype(int)
        zeros[0, 0] = highest_zero  # the ends of the range occur
        zeros[1, 0] = 1
    codes = np.rint(groups / scales.astype(np.float32)[:, :, None]) + zeros[:, :, None]
    return np.clip(codes, 0, 15).astype(int).reshape(weight.shape), zeros, scales


def pack_awq(codes: Array) -> Array:
    """[n, out] codes as [n, out / 8] numbers."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for place, output in enumerate(_AWQ_OUTPUTS):
        words |= codes[:, output::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def _fp8(weight: Array, *, scalar: bool) -> tuple[dict[str, Array], Array]:
    """With scalar scales of powers of two, so that fused matrices share theirs without rounding."""
    scale = np.float32(np.abs(weight).max() / 448)
    if scalar:
        scale = np.exp2(np.ceil(np.log2(scale))).astype(np.float32)
    else:
        scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    codes = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
    shape, kind = ((), np.float32) if scalar else ((1,), ml_dtypes.bfloat16)
    parts = {
        "weight": codes,
        "weight_scale": np.full(shape, scale, dtype=np.float32).astype(kind),
        "input_scale": np.full(shape, 0.25, dtype=np.float32).astype(kind),
    }
    return parts, codes.astype(np.float32) * scale

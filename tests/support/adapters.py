"""Random adapters in the layout of hf_lora_convert, and the weights that a model has with one merged in."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.tiny_decoders import TinyDecoder
from trtserve.executor.engine.shapes import LoraShape

Array = npt.NDArray[Any]

ADAPTER_MODULES = ("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate")


def random_adapter(
    shape: LoraShape, *, seed: int, rank: int, dtype: npt.DTypeLike = np.float32, batch_axis: bool = True
) -> tuple[Array, Array]:
    """Return `lora_weights` and `lora_config`; ranks differ by layer, the last module is only in the first layer."""
    random = np.random.default_rng(1000 + seed)
    rows: list[Array] = []
    config: list[list[int]] = []
    for layer in range(shape.layers):
        for module in shape.modules:
            if layer and module is shape.modules[-1] and len(shape.modules) > 1:
                continue
            own = max(1, rank - layer)
            a = random.normal(0, 0.3, (own, module.inputs))
            b = random.normal(0, 0.3, (module.outputs, own))
            rows.append(np.concatenate([a.reshape(-1), b.reshape(-1)]).astype(dtype))
            config.append([module.id, layer, own])
    most = max(len(row) for row in rows)
    weights = np.stack([np.pad(row, (0, most - len(row))) for row in rows])
    numbers = np.array(config, dtype=np.int32)
    return (weights[None], numbers[None]) if batch_axis else (weights, numbers)


def merged(tiny: TinyDecoder, shape: LoraShape, weights: Array, config: Array) -> dict[str, Array]:
    """Return the changed matrices of `tiny`, with the products of the adapter added."""
    modules = {module.id: module for module in shape.modules}
    changed: dict[str, Array] = {}
    for row, (number, layer, rank) in zip(weights[0], config[0].tolist(), strict=True):
        module = modules[number]
        name = f"transformer.layers.{layer}.{module.linear}.weight"
        matrix = changed.setdefault(name, tiny.tensors[name].astype(np.float64))
        middle, end = rank * module.inputs, rank * (module.inputs + module.outputs)
        b = row[middle:end].astype(np.float64).reshape(module.outputs, rank)
        matrix[module.first : module.first + module.outputs] += b @ row[:middle].astype(np.float64).reshape(rank, -1)
    return changed

"""Check an adapter that a client sends as `lora_weights` and `lora_config`, and split it into matrices."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.lora_modules import MODULE_IDS, LoraModule, LoraShape

Array = npt.NDArray[Any]

_NAMES = {number: name for name, number in MODULE_IDS.items()}
# Module id, layer, rank; a fourth number marks DoRA (TensorRT-LLM 1.x).
_COLUMNS = (3, 4)


@dataclass(slots=True, eq=False)
class LoraAdapter:
    """One adapter in the type that the engine computes with."""

    task_id: int
    matrices: Mapping[tuple[int, int], tuple[Array, Array]]
    """(layer, module id) → in-weights [rank, inputs] and out-weights [rank, outputs]."""
    content: int = 0
    """Digest of the weights: if a task id comes back with other weights, old keys and values must not be reused."""
    pages: int = 0
    """Pages in the cache."""
    holders: int = 0
    """Number of requests that use it."""
    ranks: Mapping[int, int] = field(init=False)
    """Largest rank of each module over the layers."""

    def __post_init__(self) -> None:
        ranks: dict[int, int] = {}
        for (_, module), (inputs, _) in self.matrices.items():
            ranks[module] = max(len(inputs), ranks.get(module, 0))
        self.ranks = ranks


def read_adapter(task_id: int, weights: Array, config: Array, shape: LoraShape, *, max_rank: int) -> LoraAdapter:
    """Split an adapter into matrices.

    `weights` float[(1,) rows, most] holds in each row the in-weights [rank, inputs] followed by the out-weights
    [outputs, rank], already scaled; `config` int32[(1,) rows, 3] their module id, layer and rank, as written by
    `hf_lora_convert`. Raises RuntimeError if they do not match each other or the engine.
    """
    rows, numbers = _two_dimensional(weights, "lora_weights"), _two_dimensional(config, "lora_config")
    _check_types(rows, numbers)
    modules = {module.id: module for module in shape.modules}
    matrices: dict[tuple[int, int], tuple[Array, Array]] = {}
    digest = hashlib.blake2b(digest_size=8)
    for array in (rows, numbers):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    for row, (number, layer, rank, *dora) in zip(rows, numbers.tolist(), strict=True):
        if any(dora):
            raise RuntimeError("The adapter is a DoRA adapter; this engine accepts LoRA adapters only")
        module = _checked_module(modules, shape, number=number, layer=layer, rank=rank, most=max_rank)
        if module.numbers(rank) > len(row):
            raise RuntimeError(
                f"lora_weights has too few values for {module.name}: rank {rank} needs {module.numbers(rank)}, "
                f"a row has {len(row)}"
            )
        matrices[layer, number] = _matrices(row, module, rank, bfloat16=shape.bfloat16)
    return LoraAdapter(task_id=task_id, matrices=matrices, content=int.from_bytes(digest.digest(), "little"))


def _two_dimensional(values: Array, name: str) -> Array:
    """Return the rows of a tensor that may have a batch axis."""
    array = np.asarray(values)
    if array.ndim == 3 and len(array) != 1:
        raise RuntimeError(f"Expected batch dimension to be 1 for each lora request; {name} has {len(array)}")
    if array.ndim not in (2, 3):
        raise RuntimeError(f"Invalid shape for {name} tensor: {list(array.shape)}; expected [rows, n] or [1, rows, n]")
    return array[0] if array.ndim == 3 else array


def _check_types(weights: Array, config: Array) -> None:
    if weights.dtype not in (np.float32, np.float16, ml_dtypes.bfloat16):
        raise RuntimeError(f"lora_weights has type {weights.dtype}; expected float16, bfloat16 or float32")
    if config.dtype != np.int32:
        raise RuntimeError(f"Expected lora_config to have TYPE_INT32 but was {config.dtype}")
    if len(weights) != len(config) or not len(config):
        raise RuntimeError(
            f"Expected lora_weights and lora_config to have the same number of rows, 1 or more; they have "
            f"{len(weights)} and {len(config)}"
        )
    if config.shape[1] not in _COLUMNS:
        raise RuntimeError(f"Expected rows of lora_config to have 3 numbers; they have {config.shape[1]}")


def _checked_module(
    modules: Mapping[int, LoraModule], shape: LoraShape, *, number: int, layer: int, rank: int, most: int
) -> LoraModule:
    if not 0 <= layer < shape.layers:
        raise RuntimeError(f"Expected layerId to be in the range [0, {shape.layers}); lora_config has {layer}")
    if rank < 1:
        raise RuntimeError(f"Expected adapterSize to be > 0; lora_config has {rank}")
    if number not in modules:
        raise RuntimeError(f"lora module {_NAMES.get(number, number)} not enabled for this model")
    if rank > most:
        raise RuntimeError(f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank ({most})")
    return modules[number]


def _matrices(row: Array, module: LoraModule, rank: int, *, bfloat16: bool) -> tuple[Array, Array]:
    """Return in-weights [rank, inputs] and out-weights [rank, outputs] of one row without its padding."""
    target = ml_dtypes.bfloat16 if bfloat16 else np.float32
    values = row[: module.numbers(rank)].astype(target)
    # An infinite number would reach the other requests of a step: 0 × ∞ is not 0.
    if not np.isfinite(values.astype(np.float32, copy=False)).all():
        raise RuntimeError(f"lora_weights has values for {module.name} that are not finite")
    middle = rank * module.inputs
    outputs = values[middle:].reshape(module.outputs, rank)
    return values[:middle].reshape(rank, module.inputs), np.ascontiguousarray(outputs.T)

"""What a client sends as an adapter: `lora_weights` and `lora_config`, checked and taken apart into matrices."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtserve.executor.lora_modules import MODULE_IDS, LoraModule, LoraShape

Array = npt.NDArray[Any]

_NAMES = {number: name for name, number in MODULE_IDS.items()}
# module id, layer, rank; a fourth number tells DoRA (TensorRT-LLM 1.x).
_COLUMNS = (3, 4)


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter in the type that the engine calculates with; `holders` counts the requests that use it.

    `matrices` maps (layer, module id) to in-weights [rank, inputs] and out-weights [rank, outputs]; `ranks` is the
    largest rank of each module over the layers; `pages` is what it takes in the cache. `content` is a digest of the
    weights: a task id may come back with others, and keys and values of the former ones are not its own then.
    """

    task_id: int
    matrices: Mapping[tuple[int, int], tuple[Array, Array]]
    content: int = 0
    pages: int = 0
    holders: int = 0
    ranks: Mapping[int, int] = field(init=False)

    def __post_init__(self) -> None:
        ranks: dict[int, int] = {}
        for (_, module), (inputs, _) in self.matrices.items():
            ranks[module] = max(len(inputs), ranks.get(module, 0))
        self.ranks = ranks


def read_adapter(task_id: int, weights: Array, config: Array, shape: LoraShape, *, max_rank: int) -> Adapter:
    """Take an adapter apart.

    `weights` float[(1,) rows, most] holds in each row the in-weights [rank, inputs] and after them the out-weights
    [outputs, rank], already scaled; `config` int32[(1,) rows, 3] their module id, layer and rank (section 6 of
    TensorRT-LLM's conversion, `hf_lora_convert`). RuntimeError when they do not fit each other or the engine.
    """
    rows, numbers = _two_dimensional(weights, "lora_weights"), _two_dimensional(config, "lora_config")
    _check_types(rows, numbers)
    modules = {module.id: module for module in shape.modules}
    matrices: dict[tuple[int, int], tuple[Array, Array]] = {}
    for row, (number, layer, rank) in zip(rows, _described(numbers), strict=True):
        module = _checked_module(modules, shape, number=number, layer=layer, rank=rank, most=max_rank)
        if module.numbers(rank) > len(row):
            raise RuntimeError(
                f"lora_weights has too few values for {module.name}: rank {rank} needs {module.numbers(rank)}, "
                f"a row has {len(row)}"
            )
        matrices[layer, number] = _matrices(row, module, rank, bfloat16=shape.bfloat16)
    return Adapter(task_id=task_id, matrices=matrices, content=_digest(rows, numbers))


def _digest(*arrays: Array) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little")


def _two_dimensional(values: Array, name: str) -> Array:
    """The rows of a tensor that may have the batch's axis in front."""
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


def _described(config: Array) -> Iterator[tuple[int, int, int]]:
    for row in config.tolist():
        if any(row[3:]):
            raise RuntimeError("The adapter is a DoRA adapter; this engine takes LoRA adapters only")
        yield row[0], row[1], row[2]


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
    """In-weights [rank, inputs] and out-weights [rank, outputs] of one row, whose padding is dropped."""
    target = ml_dtypes.bfloat16 if bfloat16 else np.float32
    values = row[: module.numbers(rank)].astype(target)
    # An infinite number would reach the other requests of a step: 0 × ∞ is not 0.
    if not np.isfinite(values.astype(np.float32, copy=False)).all():
        raise RuntimeError(f"lora_weights has numbers for {module.name} that are not finite")
    middle = rank * module.inputs
    outputs = values[middle:].reshape(module.outputs, rank)
    return values[:middle].reshape(rank, module.inputs), np.ascontiguousarray(outputs.T)

"""LoRA adapters: read what a client sends, cache and evict it, and turn those of a step into inputs of the graph.

The rules are those of TensorRT-LLM's PeftCacheManager and LoraCache. `resolve` and `release` need a lock against each
other; `batch` is for the thread that runs the steps.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.limits import DEFAULT_DEVICE_FRACTION, AdapterOptions
from trtserve.executor.engine.requests import AdapterSource
from trtserve.executor.engine.shapes import MODULE_IDS, LoraModule, LoraShape
from trtserve.programs.shared.arrays import read_array

Array = npt.NDArray[Any]

logger = logging.getLogger(__name__)

DEFAULT_HOST_BYTES = 2**30

_SLACK = 4  # a stack is kept when adapters leave the batch, until it has this many times the adapters needed


class NotCachedError(RuntimeError):
    """A task id came without weights and is not in the cache; the client must send the weights."""


@dataclass(frozen=True, eq=False)
class AdapterStack:
    """Several adapters side by side: adapter by adapter, and within an adapter module by module."""

    adapters: tuple[LoraAdapter, ...]
    shape: LoraShape

    @cached_property
    def owners(self) -> Mapping[str, npt.NDArray[np.int64]]:
        """For every matrix the adapter (its index in `adapters`) of each column, i64[w]."""
        owners: dict[str, list[int]] = {linear: [] for linear in self.shape.linears}
        for place, adapter in enumerate(self.adapters):
            for module in self.shape.modules:
                owners[module.linear].extend([place] * adapter.ranks.get(module.id, 0))
        return {linear: np.array(places, dtype=np.int64) for linear, places in owners.items()}

    @cached_property
    def weights(self) -> Mapping[tuple[int, str], tuple[Array, Array]]:
        """(layer, matrix) → in-weights [w, inputs] and out-weights [w, outputs of the whole matrix]."""
        shape, target = self.shape, _bfloat16() if self.shape.bfloat16 else np.float32
        weights: dict[tuple[int, str], tuple[Array, Array]] = {
            (layer, linear): (np.zeros((columns, inputs), target), np.zeros((columns, outputs), target))
            for linear, (inputs, outputs) in shape.linears.items()
            for columns in [len(self.owners[linear])]
            for layer in range(shape.layers)
        }
        columns = dict.fromkeys(shape.linears, 0)
        for adapter in self.adapters:
            for module in shape.modules:
                for layer in range(shape.layers):
                    a, b = adapter.matrices.get((layer, module.id), (None, None))
                    if a is not None and b is not None:
                        into, out = weights[layer, module.linear]
                        rows = slice(columns[module.linear], columns[module.linear] + len(a))
                        into[rows] = a
                        out[rows, module.first : module.first + module.outputs] = b
                columns[module.linear] += adapter.ranks.get(module.id, 0)
        return weights


@dataclass(frozen=True, slots=True, eq=False)
class AdapterBatch:
    """The adapters of one step. The same stack means the same weights as before."""

    stack: AdapterStack
    owner: npt.NDArray[np.int64]  # the adapter of each token, its index in `stack.adapters`, i64[tokens]; -1: none

    @property
    def masks(self) -> Mapping[str, npt.NDArray[np.bool_]]:
        """For every matrix the columns of `stack` that each token uses, bool[tokens, w]."""
        return {linear: self.owner[:, None] == columns for linear, columns in self.stack.owners.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pages:
    """Sizes of the cache in pages, as upstream counts them.

    A slot is one row and column of the smallest module.
    """

    slot_numbers: int
    slots_per_page: int  # a page holds an adapter of the optimal rank in all modules
    host: int
    device: int
    max_rank: int

    @classmethod
    def of(cls, shape: LoraShape, options: AdapterOptions, free_memory: int) -> _Pages:
        """Return the pages of `options` for adapters of `shape`.

        Raises RuntimeError if a given size is too small for one.
        """
        best, most = min(options.optimal_rank, shape.max_rank), min(options.max_rank, shape.max_rank)
        numbers = [module.numbers(1) for module in shape.modules]
        slot, widest = min(numbers), -(-max(numbers) // min(numbers))
        per_page = max(shape.layers * best * sum(-(-count // slot) for count in numbers), most * widest)
        least = -(-most * sum(numbers) * shape.layers // slot)
        item = 2 if shape.bfloat16 else 4

        def pages(place: str, units: int, size: int | None, default: int) -> int:
            given = units * widest if units > 0 else None if size is None else size // (slot * item)
            if given is not None and given < least:
                raise RuntimeError(
                    f"Not enough space allocated to {place} LoRA cache to hold 1 max sized LoRA {given} < {least}"
                )
            return -(-max(given if given is not None else default // (slot * item), least) // per_page)

        fraction = options.device_fraction
        share = None if fraction is None else int(fraction * free_memory)
        return cls(
            slot_numbers=slot,
            slots_per_page=per_page,
            host=pages("host", options.host_module_layers, options.host_bytes, DEFAULT_HOST_BYTES),
            device=pages("device", options.device_module_layers, share, int(DEFAULT_DEVICE_FRACTION * free_memory)),
            max_rank=most,
        )

    def pages_for(self, sizes: Iterable[int]) -> int:
        """Return the pages of an adapter whose rows have `sizes` numbers; a row does not span pages."""
        pages, filled = 0, self.slots_per_page
        for size in sizes:
            slots = -(-size // self.slot_numbers)
            if filled + slots > self.slots_per_page:
                pages, filled = pages + 1, 0
            filled += slots
        return pages


class AdapterCache:
    """The adapters that an executor knows.

    shape: that of the engine, or None if it was built without adapters.
    free_memory: the bytes to which a fraction in `options` applies.
    """

    def __init__(self, shape: LoraShape | None, options: AdapterOptions, *, free_memory: int) -> None:
        self._shape = shape
        self._pages = None if shape is None else _Pages.of(shape, options, free_memory)
        # Least recently used first.
        self._adapters: OrderedDict[int, LoraAdapter] = OrderedDict()
        self._stack: AdapterStack | None = None
        if shape is not None and options.prefetch_dir:
            self._prefetch(Path(options.prefetch_dir))

    def resolve(self, source: AdapterSource) -> LoraAdapter:
        """Return the adapter of a request; it stays cached until `release`.

        Weights sent with a known task id are ignored, as upstream does. Raises RuntimeError if the engine has no
        adapters, the tensors do not fit it, or the cache is full. Raises NotCachedError for an unknown id without
        weights.
        """
        if self._shape is None:
            raise RuntimeError(
                "lora_task_id was given, but the engine was built without adapters; build it with --lora-plugin and "
                "--lora-target-modules"
            )
        task = source.task_id
        adapter = self._adapters.get(task)
        if adapter is None:
            if source.weights is None or source.config is None:
                raise NotCachedError(f"LoRA task {task} not found in cache. Please send LoRA weights with request")
            adapter = self._put(task, source.weights, source.config)
        adapter.holders += 1
        self._adapters.move_to_end(task)
        return adapter

    def release(self, adapter: LoraAdapter) -> None:
        """Note that a request that resolved `adapter` has ended."""
        adapter.holders -= 1
        if adapter.holders == 0 and self._adapters.get(adapter.task_id) is adapter:
            self._adapters.move_to_end(adapter.task_id)

    def fits(self, adapters: Iterable[LoraAdapter | None]) -> bool:
        """Return whether these adapters can be used in one step: upstream's device cache must hold all of them."""
        if self._pages is None:
            return True
        return sum(adapter.pages for adapter in {*adapters} if adapter is not None) <= self._pages.device

    def batch(self, spans: Sequence[tuple[LoraAdapter | None, int]]) -> AdapterBatch | None:
        """Return the graph's inputs for tokens in `spans` = (adapter, tokens), in order, or None without adapters."""
        active = list(dict.fromkeys(adapter for adapter, _ in spans if adapter is not None))
        if not active:
            return None
        stack = self._stack  # kept while it has all active adapters and is not much wider than needed
        if stack is None or not set(active) <= set(stack.adapters) or len(stack.adapters) > _SLACK * len(active):
            assert self._shape is not None
            self._stack = stack = AdapterStack(tuple(active), self._shape)
        places: dict[LoraAdapter | None, int] = {adapter: place for place, adapter in enumerate(stack.adapters)}
        owner = np.repeat([places.get(adapter, -1) for adapter, _ in spans], [tokens for _, tokens in spans])
        return AdapterBatch(stack, owner)

    def _put(self, task: int, weights: Array, config: Array) -> LoraAdapter:
        assert self._shape is not None
        assert self._pages is not None
        adapter = read_adapter(task, weights, config, self._shape, max_rank=self._pages.max_rank)
        adapter.pages = self._pages.pages_for(a.size + b.size for a, b in adapter.matrices.values())
        self._evict_for(adapter)
        self._adapters[task] = adapter
        return adapter

    def _evict_for(self, adapter: LoraAdapter) -> None:
        assert self._pages is not None
        missing = sum(other.pages for other in self._adapters.values()) + adapter.pages - self._pages.host
        leaving = []
        for other in self._adapters.values():
            if missing <= 0:
                break
            if other.holders == 0:
                leaving.append(other.task_id)
                missing -= other.pages
        if missing > 0:
            raise RuntimeError(
                f"PEFT Cache is full. Could not store taskId={adapter.task_id}. "
                "Cache is full. There are no done tasks to evict"
            )
        for task in leaving:
            del self._adapters[task]

    def _prefetch(self, folder: Path) -> None:
        """Read the adapters in `folder`: one folder of `hf_lora_convert` per task id, named by its number."""
        if not folder.is_dir():
            logger.warning("lora_prefetch_dir %s is not a folder; no adapter was read", folder)
            return
        for path in sorted(folder.iterdir()):
            if not path.name.isdecimal():
                logger.warning("lora_prefetch_dir: %s is not named by a task id and was not read", path.name)
                continue
            arrays = [read_array(path / f"model.lora_{kind}.npy") for kind in ("weights", "config")]
            self._put(int(path.name), arrays[0], arrays[1])


_NAMES = {number: name for name, number in MODULE_IDS.items()}
_COLUMNS = (3, 4)  # module id, layer, rank; a fourth number marks DoRA (TensorRT-LLM 1.x)


@dataclass(slots=True, eq=False)
class LoraAdapter:
    """One adapter in the type that the engine computes with."""

    task_id: int
    matrices: Mapping[tuple[int, int], tuple[Array, Array]]
    """(layer, module id) → in-weights [rank, inputs] and out-weights [rank, outputs]."""
    content: int = 0
    """Digest of the weights: if a task id comes back with other weights, old keys and values must not be reused."""
    pages: int = 0  # pages in the cache
    holders: int = 0  # number of requests that use it
    ranks: Mapping[int, int] = field(init=False)  # largest rank of each module over the layers

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
    if weights.dtype not in (np.float32, np.float16, _bfloat16()):
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
    target = _bfloat16() if bfloat16 else np.float32
    values = row[: module.numbers(rank)].astype(target)
    # An infinite number would reach the other requests of a step: 0 × ∞ is not 0.
    if not np.isfinite(values.astype(np.float32, copy=False)).all():
        raise RuntimeError(f"lora_weights has values for {module.name} that are not finite")
    middle = rank * module.inputs
    outputs = values[middle:].reshape(module.outputs, rank)
    return values[:middle].reshape(rank, module.inputs), np.ascontiguousarray(outputs.T)


def _bfloat16() -> Any:
    import ml_dtypes  # which NVIDIA's images with vLLM may lack

    return ml_dtypes.bfloat16

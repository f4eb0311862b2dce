"""LoRA adapters on the device, and those of a step: spans of neighbouring tokens with the same adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtserve.executor.engine.lora import AdapterBatch, AdapterStack, LoraAdapter
from trtserve.executor.engine.shapes import LoraShape
from trtserve.executor.torch.weights import EngineWeights

if TYPE_CHECKING:
    from trtserve.executor.torch.operations import Operations

SPAN = 16
"""The most tokens of a span: a tile of the kernels."""
Spans: TypeAlias = npt.NDArray[np.int32]
"""i32[n, 3]: a place in `AdapterStore`, the first token, and how many."""


def spans_of(places: npt.NDArray[Any]) -> Spans:
    """Return the spans of tokens whose adapters are at `places` [t] of the store; -1: none."""
    edges = np.flatnonzero(np.diff(places, prepend=-2, append=-2))
    spans = [
        (places[first], begin, min(SPAN, end - begin))
        for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        if places[first] >= 0
        for begin in range(first, end, SPAN)
    ]
    return np.array(spans, np.int32).reshape(-1, 3)


class AdapterStore:
    """The weights of the adapters of the last stack, in the parts of one rank, and where kernels find them.

    table i64[layers, places, matrices, 3]: the addresses of the in-weights [w, inputs] and the out-weights [w, outputs]
    of an adapter, and w, which is a sum of ranks. A CUDA graph reads it, so that adapters may come and go.
    """

    def __init__(
        self,
        shape: LoraShape,
        weights: EngineWeights,
        layers: range,
        *,
        most: int,
        dtype: Any,
        device: str,
    ) -> None:
        """`most` adapters have a place."""
        self._weights = weights
        self.layers = layers
        self._dtype = dtype
        self._device = device
        self._stack: AdapterStack | None = None
        self.matrices = sorted(shape.linears)  # fc and gate, which may be one product, are neighbours
        self.ranks = {
            matrix: shape.max_rank * sum(module.linear == matrix for module in shape.modules)
            for matrix in self.matrices
        }
        """The largest w of each matrix."""
        self.table = torch.zeros((len(layers), most, len(self.matrices), 3), dtype=torch.int64, device=device)
        self._places: dict[int, int] = {}  # by the digest of the weights
        self.held: dict[int, dict[tuple[int, int], tuple[Tensor, Tensor]]] = {}
        """place → (layer, number of the matrix) → in-weights and out-weights."""

    def places(self, batch: AdapterBatch) -> npt.NDArray[np.int64]:
        """Return the place of each token's adapter; copies weights only when the stack is another one than before."""
        stack = batch.stack
        if stack is not self._stack:
            kept = {adapter.content for adapter in stack.adapters}
            for content in self._places.keys() - kept:
                del self.held[self._places.pop(content)]
            for adapter in stack.adapters:
                if adapter.content not in self._places:
                    place = next(each for each in range(self.table.shape[1]) if each not in self.held)
                    self.held[place] = self._load(adapter, stack.shape, place)
                    self._places[adapter.content] = place
            self._stack = stack
        found = np.array([*(self._places[adapter.content] for adapter in stack.adapters), -1], np.int64)
        return found[batch.owner]

    def _load(self, adapter: LoraAdapter, shape: LoraShape, place: int) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        """Copy an adapter to the device, and note where it is."""
        arrays = AdapterStack((adapter,), shape).weights
        held = {
            (layer, number): self._local(
                f"transformer.layers.{layer}.{matrix}.weight", *map(self._copy, arrays[layer, matrix])
            )
            for layer in self.layers
            for number, matrix in enumerate(self.matrices)
        }
        rows = [(a.data_ptr(), b.data_ptr(), len(a)) for a, b in held.values()]
        self.table[:, place] = torch.tensor(rows).view(len(self.layers), -1, 3).to(self._device)
        return held

    def _copy(self, array: Any) -> Tensor:
        if array.dtype != np.float32:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self._device, self._dtype)
        return torch.from_numpy(array).to(self._device, self._dtype)

    def _local(self, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs or outputs that this rank's part of the matrix has."""
        pieces = self._weights.shard(name).pieces
        if self._weights.split(name) == "row":
            return torch.cat([a[:, piece.first_column :][:, : piece.columns] for piece in pieces], 1), b
        return a, torch.cat([b[:, piece.first_row :][:, : piece.rows] for piece in pieces], 1)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of the tokens of a step."""

    store: AdapterStore
    spans: Tensor
    """i32[n, 3], see `Spans`; those of no tokens are padding."""
    kept: Tensor | None = None
    """The spans of the tokens whose logits are needed, as if there were no others."""
    beside: bool = False
    """Their first products may be computed beside those of the layer, on a stream of their own."""

    def of_rows(self) -> Adapters:
        """Return the adapters of the tokens whose logits are needed."""
        return self if self.kept is None else replace(self, spans=self.kept)

    def begin(
        self, x: Tensor, layer: int, parts: Sequence[tuple[str, slice]], operations: Operations
    ) -> Callable[[Tensor], None] | None:
        """Begin to compute what the adapters make of `x` [t, inputs]; the result adds it to the product [t, outputs].

        `parts` are the matrices of the product and their outputs, all with as many. None: no adapter knows them.
        """
        store = self.store
        known = [(store.matrices.index(name), outputs) for name, outputs in parts if name in store.matrices]
        if not known:
            return None
        (matrix, outputs), last = known[0], known[-1][1].stop
        add = operations.begin_adapters(x, self, layer, matrix, len(known))
        return lambda product: add(product[:, outputs.start : last])

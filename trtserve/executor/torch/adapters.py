"""LoRA adapters of a step on the device: what they add to the products of the decoder's matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trtserve.executor.engine.lora import AdapterBatch, AdapterStack
from trtserve.executor.torch.weights import ShardWeights

Tensor = Any


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of the tokens of a step."""

    masks: Mapping[str, Tensor]
    """For every matrix the columns of the weights that each token uses, bool[t, w]."""
    weights: Mapping[tuple[int, str], tuple[Tensor, Tensor]]
    """(layer, matrix) → in-weights [w, inputs of this rank] and out-weights [w, outputs of this rank]."""

    def of_rows(self, rows: Tensor) -> Adapters:
        """Return the adapters of some of the tokens."""
        return replace(self, masks={name: mask[rows] for name, mask in self.masks.items()})

    def add(self, product: Tensor, x: Tensor, layer: int, matrix: str) -> None:
        """Add to `product` [t, outputs] of a matrix and `x` [t, inputs] what the adapters make of `x`."""
        if (layer, matrix) in self.weights:
            a, b = self.weights[layer, matrix]
            product += (x @ a.T).where(self.masks[matrix], 0) @ b


class AdapterWeights:
    """Keeps the weights of the last stack of adapters on the device."""

    def __init__(self, weights: ShardWeights, layers: range, *, dtype: Any, device: str) -> None:
        self._decoder = weights
        self._layers = layers
        self._dtype = dtype
        self._device = device
        self._stack: AdapterStack | None = None
        self._weights: Mapping[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def batch(self, batch: AdapterBatch) -> Adapters:
        """Return the adapters of a step; their weights are copied when the stack is another one than before."""
        if batch.stack is not self._stack:
            self._weights = {
                (layer, matrix): self._local(f"transformer.layers.{layer}.{matrix}.weight", *map(self._copy, pair))
                for (layer, matrix), pair in batch.stack.weights.items()
                if layer in self._layers
            }
            self._stack = batch.stack
        masks = {matrix: torch.from_numpy(mask).to(self._device) for matrix, mask in batch.masks.items()}
        return Adapters(masks, self._weights)

    def _copy(self, array: Any) -> Tensor:
        if array.dtype != np.float32:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self._device, self._dtype)
        return torch.from_numpy(array).to(self._device, self._dtype)

    def _local(self, name: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs or outputs that this rank's part of the matrix has."""
        pieces = self._decoder.shard(name).pieces
        if self._decoder.split(name) == "row":
            return torch.cat([a[:, piece.first_column :][:, : piece.columns] for piece in pieces], 1), b
        return a, torch.cat([b[:, piece.first_row :][:, : piece.rows] for piece in pieces], 1)

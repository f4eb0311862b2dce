"""An input to each layer made of the token, and values that are normed (Gemma 4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.architectures.base import Decoder
from trtserve.executor.engine.shapes import Sizes
from trtserve.executor.torch.modules import Linear
from trtserve.executor.torch.operations import Operations
from trtserve.executor.torch.plain_operations import activate
from trtserve.executor.torch.weights import EngineWeights


class LayerInputs:
    """The inputs of all layers; every rank has all of them."""

    def __init__(self, decoder: Decoder, sizes: Sizes, weights: EngineWeights, operations: Operations) -> None:
        self._size, self._sizes, self._operations = decoder.layer_inputs, sizes, operations
        self._table = weights.tensor("transformer.layer_embedding.weight")
        self._proj = Linear(weights, ["transformer.layer_projection"], operations)
        self._norm = weights.tensor("transformer.layer_norm.weight")

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """Return [t, layers, n] of the tokens and their embeddings [t, hidden]."""
        shape = len(ids), self._sizes.layers, self._size
        made = self._operations.rms_norm(
            (self._proj(embedded) * self._sizes.hidden**-0.5).view(shape), self._norm, self._sizes.epsilon
        )
        own = functional.embedding(ids, self._table).view(shape) * math.sqrt(self._size)
        return (made + own) * math.sqrt(0.5)


class LayerInput:
    """What one layer makes of its input."""

    def __init__(self, decoder: Decoder, weights: EngineWeights, number: int, operations: Operations) -> None:
        name = f"transformer.layers.{number}"
        self._activation = decoder.activation
        self._gate = Linear(weights, [f"{name}.inputs.gate"], operations)
        self._proj = Linear(weights, [f"{name}.inputs.proj"], operations)

    def __call__(self, hidden: Tensor, own: Tensor) -> Tensor:
        """Return what is made of states [t, hidden] and the layer's input [t, n]."""
        return self._proj(activate(self._gate(hidden), self._activation) * own)


@dataclass(frozen=True)
class NormedValues:
    """Norms each head's values by their RMS alone."""

    width: int
    """Of all values."""
    size: int
    epsilon: float

    def __call__(self, qkv: Tensor, positions: Tensor) -> Tensor:
        """Return qkv [t, (H + 2 · KV) · D] with normed values."""
        del positions
        value = qkv[:, -self.width :].unflatten(1, (-1, self.size)).float()
        normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + self.epsilon)
        return torch.cat([qkv[:, : -self.width], normed.flatten(1).to(qkv.dtype)], 1)

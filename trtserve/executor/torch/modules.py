"""The parts that a decoder is made of: embeddings, norms and matrices of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from trtserve.checkpoint.architectures.base import Activation
from trtserve.checkpoint.architectures.base import Norm as NormKind
from trtserve.executor.torch.adapters import Adapters
from trtserve.executor.torch.group import RankGroup
from trtserve.executor.torch.matrices import FloatMatrix, Matrix, load_matrix
from trtserve.executor.torch.operations import Operations
from trtserve.executor.torch.weights import ShardWeights

Tensor = Any


class Embedding:
    """Rows [n, hidden] for token ids or positions; ranks may share its rows or its columns."""

    def __init__(self, weights: ShardWeights, name: str, group: RankGroup) -> None:
        self.weight = weights.tensor(f"{name}.weight")
        self._split = weights.split(f"{name}.weight")
        self._group = group

    def __call__(self, ids: Tensor) -> Tensor:
        if self._split == "vocab" and self._group.tp_size > 1:
            local = ids - self._group.tp_rank * len(self.weight)
            own = (local >= 0) & (local < len(self.weight))
            found = functional.embedding(local.where(own, 0), self.weight)
            return self._group.all_reduce(found.where(own.unsqueeze(1), 0))
        found = functional.embedding(ids, self.weight)
        return self._group.all_gather(found) if self._split == "row" else found


class Norm:
    """A norm over hidden states."""

    def __init__(
        self, weights: ShardWeights, name: str, kind: NormKind, epsilon: float, operations: Operations
    ) -> None:
        self._weight = weights.tensor(f"{name}.weight")
        self._bias = weights.tensor(f"{name}.bias") if kind == "layer" else None
        self._epsilon = epsilon
        self._operations = operations

    def __call__(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return self._operations.rms_norm(x, self._weight, self._epsilon)
        return functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._epsilon)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and this sum; both may be overwritten."""
        if residual is None:
            return self(x), x
        if self._bias is None:
            return self._operations.add_rms_norm(x, residual, self._weight, self._epsilon)
        total = x + residual
        return self(total), total

    def then(
        self,
        linear: Linear,
        x: Tensor,
        residual: Tensor | None,
        adapters: Adapters | None,
        activation: Activation | None = None,
        *,
        factor_first: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return linear(norm(x + residual)), `gated` if there is an activation, and the sum."""
        matrix = linear.matrix
        if self._bias is None and adapters is None and isinstance(matrix, FloatMatrix):
            return self._operations.norm_linear(
                x,
                residual,
                self._weight,
                self._epsilon,
                matrix.weight,
                linear.bias,
                activation,
                factor_first=factor_first,
            )
        normed, total = self.add(x, residual)
        product = linear(normed, adapters)
        if activation is not None:
            product = self._operations.gated(product, activation, factor_first=factor_first)
        return product, total


class Linear:
    """x [t, in] · weight [out, in]ᵀ + bias, and what LoRA adapters add.

    Several `names` are computed in one product, their outputs side by side. With a `group` each rank has some of the
    inputs, and the sum over the ranks is returned. A `matrix` that is loaded already takes the place of the weights.
    """

    def __init__(
        self,
        weights: ShardWeights,
        names: Sequence[str],
        operations: Operations,
        *,
        layer: int | None = None,
        group: RankGroup | None = None,
        matrix: Matrix | None = None,
    ) -> None:
        biases = [weights.tensor(f"{name}.bias") for name in names if f"{name}.bias" in weights]
        self.matrix = matrix or load_matrix(weights, [f"{name}.weight" for name in names], operations)
        self.bias = biases[0] if len(biases) == 1 else torch.cat(biases) if biases else None
        # A bias that all ranks hold is added once to their sum; of another kind only the first rank's is not zero.
        self._bias_last = bool(biases) and group is not None and weights.split(f"{names[0]}.bias") == "replicated"
        self._layer = layer
        self._group = group
        self._parts = []
        first = 0
        for name in names:
            outputs = slice(first, first + weights.shard(f"{name}.weight").shape[0])
            self._parts.append((name.removeprefix(f"transformer.layers.{layer}."), outputs))
            first = outputs.stop

    def __call__(self, x: Tensor, adapters: Adapters | None = None) -> Tensor:
        product = self.matrix(x, None if self._bias_last else self.bias)
        if adapters is not None and self._layer is not None:
            for matrix, outputs in self._parts:
                adapters.add(product[:, outputs], x, self._layer, matrix)
        if self._group is not None:
            product = self._group.all_reduce(product)
        return product + self.bias if self._bias_last else product

"""Matrices as a rank stores them: floats, or FP8 codes with one scale for the weights and one for the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional

from trtserve.executor.torch.operations import Operations
from trtserve.executor.torch.weights import ShardWeights

Tensor = Any

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max


class Matrix(Protocol):
    """A matrix [out, in]."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x [t, in] · matrixᵀ + bias: [t, out]."""


class FloatMatrix:
    """A matrix of floats."""

    def __init__(self, weight: Tensor, operations: Operations) -> None:
        self.weight = weight
        self._operations = operations

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Matrix`."""
        return self._operations.linear(x, self.weight, bias)


class Fp8Matrix:
    """A matrix of FP8 codes. Inputs are rounded to FP8 with the scale that the model was calibrated with."""

    def __init__(self, codes: Tensor, scale: Tensor, input_scale: Tensor) -> None:
        self._codes = codes
        self._scale = scale
        self._input_scale = input_scale

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """See `Matrix`."""
        codes = (x / self._input_scale).clamp(-_LARGEST, _LARGEST).to(_FP8)
        one = functional.ScalingType.TensorWise
        product = functional.scaled_mm(
            codes, self._codes.T, self._input_scale, one, self._scale, one, output_dtype=x.dtype
        )
        return product if bias is None else product + bias


def load_matrix(weights: ShardWeights, names: Sequence[str], operations: Operations) -> Matrix:
    """Return the matrices `names` as one, their outputs one after another.

    FP8 matrices with different scales get the largest one: the codes of the others are rounded again.
    """
    scales = [weights.fp8_scales(name) for name in names]
    own = [pair for pair in scales if pair is not None]
    if len(own) < len(names):
        parts = [load_floats(weights, name) for name in names]
        return FloatMatrix(parts[0] if len(parts) == 1 else torch.cat(parts), operations)
    shared = torch.stack([scale for scale, _ in own]).amax(0)
    codes = [
        part if torch.equal(scale, shared) else (part.float() * (scale / shared)).to(_FP8)
        for part, (scale, _) in zip(map(weights.tensor, names), own, strict=True)
    ]
    # Bytes can be joined on every device.
    joined = codes[0] if len(codes) == 1 else torch.cat([part.view(torch.uint8) for part in codes]).view(_FP8)
    return Fp8Matrix(joined, shared, torch.stack([input_scale for _, input_scale in own]).amax(0))


def load_floats(weights: ShardWeights, name: str) -> Tensor:
    """Return a tensor as floats; codes of FP8 matrices are widened."""
    tensor, scales = weights.tensor(name), weights.fp8_scales(name)
    if scales is None:
        return tensor
    # Experts [experts, out, in] have a scale each.
    factors = scales[0].view(-1, *[1] * (tensor.ndim - 1)) if tensor.ndim > 2 else scales[0]
    return (tensor.float() * factors).to(weights.dtype)

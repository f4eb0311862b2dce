"""The operations of a decoder layer for CUDA (`operations.Operations`), from kernels in the Triton language."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.architectures.base import Activation
from trtserve.executor.torch.adapter_kernels import begin_adapters
from trtserve.executor.torch.attention_kernels import decode_attention, prompt_attention, share_keys
from trtserve.executor.torch.expert_kernels import expert_mlp, route
from trtserve.executor.torch.fp8_kernels import multiply_fp8
from trtserve.executor.torch.layer_kernels import (
    add_rms_norm,
    gated,
    gated_rounded,
    multiply_vector,
    norm_rounded,
    rms_norm,
    rotate_and_store,
    rounded,
)
from trtserve.executor.torch.operations import Matrix, Rows
from trtserve.executor.torch.packed import FP8, Fp8Codes, PackedWeight
from trtserve.executor.torch.packed_kernels import multiply_packed, multiply_packed_vector
from trtserve.executor.torch.row_kernels import is_few, multiply_few

__all__ = [
    "add_rms_norm",
    "begin_adapters",
    "decode_attention",
    "expert_mlp",
    "gated",
    "linear",
    "norm_linear",
    "prompt_attention",
    "rms_norm",
    "rotate_and_store",
    "route",
    "share_keys",
]


def linear(x: Rows, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """See `Operations.linear`. One row of floats takes a kernel of its own, a few another."""
    if isinstance(weight, Fp8Codes):
        rows = rounded(x, weight) if isinstance(x, Tensor) and x.dtype != FP8 else x
        return multiply_few(rows, weight, bias) if is_few(rows, weight) else multiply_fp8(rows, weight, bias)
    assert isinstance(x, Tensor)
    if isinstance(weight, PackedWeight):
        return multiply_packed(x, weight, bias) if len(x) != 1 else multiply_packed_vector(x, weight, bias)
    if len(x) == 1:
        return multiply_vector(x, None, None, 0.0, weight, bias, None, factor_first=False)[0]
    return multiply_few(x, weight, bias) if is_few(x, weight) else functional.linear(x, weight, bias)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    epsilon: float,
    weight: Matrix,
    bias: Tensor | None,
    activation: Activation | None = None,
    *,
    factor_first: bool = False,
    rounding: Fp8Codes | None = None,
) -> tuple[Rows, Tensor]:
    """See `Operations.norm_linear`. One row takes a single kernel, a few or codes two."""
    if len(x) == 1 and isinstance(weight, Tensor):
        return multiply_vector(x, residual, norm, epsilon, weight, bias, activation, factor_first=factor_first)
    normed = norm_rounded(x, residual, norm, epsilon, weight if isinstance(weight, Fp8Codes) else None)
    total = x if residual is None else residual
    if isinstance(weight, PackedWeight):
        assert isinstance(normed, Tensor)
        if len(x) == 1:
            return multiply_packed_vector(normed, weight, bias, activation, factor_first=factor_first), total
    elif is_few(normed, weight):
        scale = rounding.input_scale if rounding is not None and activation is not None else None
        product = multiply_few(normed, weight, bias, activation, factor_first=factor_first, rounding=scale)
        return product, total
    product = linear(normed, weight, bias)
    if activation is not None:
        return gated_rounded(product, activation, factor_first=factor_first, rounding=rounding), total
    return product, total

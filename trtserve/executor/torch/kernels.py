"""The operations of a decoder layer for CUDA (`operations.Operations`), from kernels in the Triton language."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.architectures.base import Activation
from trtserve.executor.torch.adapter_kernels import add_adapters
from trtserve.executor.torch.attention_kernels import decode_attention, prompt_attention, share_keys
from trtserve.executor.torch.expert_kernels import expert_mlp, route
from trtserve.executor.torch.layer_kernels import (
    add_rms_norm,
    gated,
    multiply_vector,
    rms_norm,
    rotate_and_store,
    rounded,
)
from trtserve.executor.torch.operations import Matrix
from trtserve.executor.torch.packed import Fp8Codes, PackedWeight
from trtserve.executor.torch.packed_kernels import multiply_packed, multiply_packed_vector
from trtserve.executor.torch.plain_operations import multiply_fp8

__all__ = [
    "add_adapters",
    "add_rms_norm",
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


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """See `Operations.linear`. One row takes a kernel that begins before its inputs are there."""
    if isinstance(weight, Fp8Codes):
        codes = rounded(x, weight.input_scale)
        if len(x) != 1:
            return multiply_fp8(codes, weight, bias)
        return multiply_vector(codes, None, None, 0.0, weight, bias, None, factor_first=False)[0]
    if isinstance(weight, PackedWeight):
        return multiply_packed(x, weight, bias) if len(x) != 1 else multiply_packed_vector(x, weight, bias)
    if len(x) == 1:
        return multiply_vector(x, None, None, 0.0, weight, bias, None, factor_first=False)[0]
    return functional.linear(x, weight, bias)


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
    rounding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `Operations.norm_linear`. One row takes a single kernel, or two if the matrix has codes."""
    if len(x) == 1 and isinstance(weight, Tensor):
        return multiply_vector(
            x, residual, norm, epsilon, weight, bias, activation, factor_first=factor_first, rounding=rounding
        )
    own = weight.input_scale if isinstance(weight, Fp8Codes) else None
    if residual is None:
        normed, total = rms_norm(x, norm, epsilon, own), x
    else:
        normed, total = add_rms_norm(x, residual, norm, epsilon, own)
    if len(x) == 1 and isinstance(weight, PackedWeight):
        return multiply_packed_vector(normed, weight, bias, activation, factor_first=factor_first), total
    if len(x) == 1 and isinstance(weight, Fp8Codes):
        product, _ = multiply_vector(
            normed, None, None, 0.0, weight, bias, activation, factor_first=factor_first, rounding=rounding
        )
        return product, total
    product = linear(normed, weight, bias)
    if activation is not None:
        product = gated(product, activation, factor_first=factor_first, rounding=rounding)
    return product, total

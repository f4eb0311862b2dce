"""The operations of a decoder layer for CUDA (`operations.Operations`), from kernels in the Triton language.

The kernels of mixtures of experts are here: each expert multiplies the tokens that chose it, and no others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.architectures.base import Activation
from trtserve.executor.torch.attention_kernels import decode_attention, prompt_attention, share_keys
from trtserve.executor.torch.layer_kernels import (
    activated,
    add_rms_norm,
    gated,
    multiply_vector,
    overlap,
    rms_norm,
    rotate_and_store,
    rounded,
    wait_for_inputs,
)
from trtserve.executor.torch.operations import ExpertWeights, Matrix
from trtserve.executor.torch.packed import Fp8Codes, PackedWeight
from trtserve.executor.torch.packed_kernels import multiply_packed, multiply_packed_vector
from trtserve.executor.torch.plain_operations import multiply_fp8

__all__ = [
    "add_rms_norm",
    "decode_attention",
    "expert_mlp",
    "gated",
    "linear",
    "norm_linear",
    "prompt_attention",
    "rms_norm",
    "rotate_and_store",
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


@triton.jit
def _expert_kernel(
    x,
    weight,
    bias,
    out,
    order,
    shares,
    begins,
    first_tiles,
    columns,
    outputs,
    experts,
    divisor,
    alpha,
    limit,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    CHUNK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply ROWS pairs (token, expert) of one expert by UNITS rows of its matrix.

    The rows of `x` are the pairs' numbers divided by `divisor`. With an ACTIVATION the product is multiplied by the
    activated product with the rows `outputs` further down ("clamped": as `ClampedGate` says); without one it is
    weighted by the pair's share.
    """
    wait_for_inputs(OVERLAPS)
    tile = tl.program_id(0)
    if tile < tl.load(first_tiles + experts):
        low, high = 0, experts - 1  # the last expert whose first tile is not after this one
        while low < high:
            middle = (low + high + 1) // 2
            before = tl.load(first_tiles + middle) <= tile
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle - 1)
        expert = low
        place = tl.load(begins + expert) + (tile - tl.load(first_tiles + expert)) * ROWS + tl.arange(0, ROWS)
        present = place < tl.load(begins + expert + 1)
        pair = tl.load(order + place, mask=present, other=0)
        unit, lane = tl.program_id(1) * UNITS + tl.arange(0, UNITS), tl.arange(0, CHUNK)
        kept = unit < outputs
        matrix = weight + tl.cast(expert, tl.int64) * columns * (outputs if ACTIVATION == "" else 2 * outputs)
        source = x + (pair // divisor)[:, None] * columns
        rows = matrix + unit.to(tl.int64)[:, None] * columns
        further = outputs.to(tl.int64) * columns
        product = tl.zeros([ROWS, UNITS], tl.float32)
        second = tl.zeros([ROWS, UNITS], tl.float32)
        for begin in range(0, columns, CHUNK):
            column = begin + lane
            inside = column < columns
            states = tl.load(source + column[None, :], mask=present[:, None] & inside[None, :], other=0.0)
            mask = kept[:, None] & inside[None, :]
            part = tl.load(rows + column[None, :], mask=mask, other=0.0)
            product = tl.dot(states, tl.trans(part), product, input_precision=PRECISION)
            if ACTIVATION != "":
                lower = tl.load(rows + further + column[None, :], mask=mask, other=0.0)
                second = tl.dot(states, tl.trans(lower), second, input_precision=PRECISION)
        if HAS_BIAS:
            own = bias + expert * (outputs if ACTIVATION == "" else 2 * outputs) + unit
            product += tl.load(own, mask=kept, other=0.0).to(tl.float32)[None, :]
            if ACTIVATION != "":
                second += tl.load(own + outputs, mask=kept, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == "clamped":
            gate = tl.minimum(second, limit)
            factor = tl.maximum(tl.minimum(product, limit), -limit) + 1
            product = factor * gate / (1 + tl.exp(-alpha * gate))
        elif ACTIVATION != "":
            product = product * activated(second, ACTIVATION)
        else:
            product *= tl.load(shares + pair, mask=present, other=0.0)[:, None]
        target = out + pair[:, None] * outputs + unit[None, :]
        tl.store(target, product.to(out.dtype.element_ty), mask=present[:, None] & kept[None, :])


def expert_mlp(x: Tensor, matrices: ExpertWeights, chosen: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """See `Operations.expert_mlp`. The pairs of token and expert are sorted by expert, and tiled expert by expert."""
    tokens, per_token = chosen.shape
    experts, hidden, inside = matrices.inner.shape
    outer_bias, inner_bias, clamp = matrices.outer_bias, matrices.inner_bias, matrices.clamp
    pairs = tokens * per_token
    rows = 16 if pairs <= 4 * experts else 64
    numbers, order = chosen.flatten().sort(stable=True)
    begins = torch.searchsorted(numbers, torch.arange(experts + 1, device=x.device))
    tiles = torch.zeros(experts + 1, dtype=torch.int64, device=x.device)
    torch.cumsum((begins.diff() + rows - 1) // rows, 0, out=tiles[1:])
    most_tiles = min(pairs, triton.cdiv(pairs, rows) + experts)
    exact = x.dtype == torch.float32
    settings = {
        "ROWS": rows,
        "UNITS": 64,
        "CHUNK": 32 if exact else 64,
        "PRECISION": "ieee",
        "num_warps": 4,
        **overlap(),
    }
    states = x.new_empty((pairs, inside))
    _expert_kernel[(most_tiles, triton.cdiv(inside, 64))](
        x, matrices.outer, x if outer_bias is None else outer_bias, states, order, weights, begins, tiles, hidden,
        inside, experts, per_token, clamp.alpha if clamp else 0.0, clamp.limit if clamp else 0.0,
        ACTIVATION="clamped" if clamp else activation, HAS_BIAS=outer_bias is not None, num_stages=3, **settings,
    )  # fmt: skip
    outputs = torch.zeros((pairs, hidden), dtype=torch.float32, device=x.device)
    _expert_kernel[(most_tiles, triton.cdiv(hidden, 64))](
        states, matrices.inner, x if inner_bias is None else inner_bias, outputs, order, weights, begins, tiles,
        inside, hidden, experts, 1, 0.0, 0.0,
        ACTIVATION="", HAS_BIAS=inner_bias is not None, num_stages=3, **settings,
    )  # fmt: skip
    return outputs.view(tokens, per_token, hidden).sum(1).to(x.dtype)

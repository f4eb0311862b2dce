"""Mixtures of experts in the Triton language: each expert multiplies the tokens that chose it, and no others."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtserve.checkpoint.architectures.base import Activation, Experts
from trtserve.executor.torch import plain_operations
from trtserve.executor.torch.layer_kernels import activated, overlap, wait_for_inputs
from trtserve.executor.torch.operations import ExpertWeights


@triton.jit
def _route_kernel(
    logits,
    correction,
    chosen,
    shares,
    scale,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    PLACES: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Choose the experts of a token, the best first; among equal ones the first."""
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    expert, place = tl.arange(0, WIDTH), tl.arange(0, PLACES)
    mask = expert < EXPERTS
    values = tl.load(logits + token * EXPERTS + expert, mask=mask, other=float("-inf"))
    if SOFTMAX:
        weights = tl.exp(values - tl.max(values, 0))
        scores = weights / tl.sum(weights, 0)
    else:
        scores = 1 / (1 + tl.exp(-values))
    wishes = scores
    if HAS_CORRECTION:
        wishes += tl.load(correction + expert, mask=mask, other=0.0)
    wishes = tl.where(mask, wishes, float("-inf"))
    numbers = tl.zeros([PLACES], tl.int32)
    found = tl.zeros([PLACES], tl.float32)
    for number in range(CHOSEN):
        # Without a best one (NaN) the number is beyond all experts, and adds nothing.
        best = tl.min(tl.where(wishes == tl.max(wishes, 0), expert, WIDTH), 0)
        numbers = tl.where(place == number, best, numbers)
        found = tl.where(place == number, tl.sum(tl.where(expert == best, scores, 0.0), 0), found)
        wishes = tl.where(expert == best, float("-inf"), wishes)
    if RENORMALIZED:
        found = found / tl.sum(found, 0)
    tl.store(chosen + token * CHOSEN + place, numbers, mask=place < CHOSEN)
    tl.store(shares + token * CHOSEN + place, found * scale, mask=place < CHOSEN)


def route(logits: Tensor, correction: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
    """See `Operations.route`. Groups of experts, which few models have, take PyTorch's kernels."""
    if experts.groups > 1:
        return plain_operations.route(logits, correction, experts)
    tokens, count = logits.shape
    chosen = logits.new_empty((tokens, experts.chosen), dtype=torch.int32)
    shares = torch.empty_like(chosen, dtype=torch.float32)
    _route_kernel[(tokens,)](
        logits,
        logits if correction is None else correction,
        chosen,
        shares,
        experts.scale,
        EXPERTS=count,
        WIDTH=triton.next_power_of_2(count),
        CHOSEN=experts.chosen,
        PLACES=triton.next_power_of_2(experts.chosen),
        SOFTMAX=experts.scores == "softmax",
        HAS_CORRECTION=correction is not None,
        RENORMALIZED=experts.renormalized,
        num_warps=1 if count <= 128 else 4,
        **overlap(),
    )
    return chosen, shares


@triton.jit(do_not_specialize=["pairs"])
def _order_kernel(
    chosen,
    order,
    begins,
    first_tiles,
    pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write the pairs (token, expert) of one expert in their order; where they begin, and its first tile of ROWS pairs.

    Each program counts the pairs of all experts, which costs less than another launch.
    """
    wait_for_inputs(OVERLAPS)
    expert, number, lane = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for begin in range(0, pairs, CHUNK):
        numbers = tl.load(chosen + begin + lane, mask=begin + lane < pairs, other=EXPERTS).to(tl.int32)
        counts += tl.histogram(tl.minimum(numbers, EXPERTS), BINS)
    written = tl.sum(tl.where(number < expert, counts, 0), 0)
    tl.store(begins + expert, written)
    tl.store(first_tiles + expert, tl.sum(tl.where(number < expert, (counts + ROWS - 1) // ROWS, 0), 0))
    if (expert < EXPERTS) & (tl.sum(tl.where(number == expert, counts, 0), 0) > 0):
        for begin in range(0, pairs, CHUNK):
            numbers = tl.load(chosen + begin + lane, mask=begin + lane < pairs, other=EXPERTS).to(tl.int32)
            mine = (numbers == expert).to(tl.int32)
            tl.store(order + written + tl.cumsum(mine, 0) - 1, begin + lane, mask=mine != 0)
            written += tl.sum(mine, 0)


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
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply ROWS pairs (token, expert) of one expert by UNITS rows of its matrix.

    The rows of `x` are the pairs' numbers divided by `divisor`. With an ACTIVATION the product is activated, or if
    GATED multiplied by the activated product with the rows `outputs` further down ("clamped": as `ClampedGate` says);
    without one it is weighted by the pair's share.
    """
    wait_for_inputs(OVERLAPS)
    tile = tl.program_id(1)  # neighbours multiply the same pairs: their states stay in the L2 cache
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
        pair = tl.load(order + place, mask=present, other=0).to(tl.int64)
        unit, lane = tl.program_id(0) * UNITS + tl.arange(0, UNITS), tl.arange(0, CHUNK)
        kept = unit < outputs
        matrix = weight + tl.cast(expert, tl.int64) * columns * (2 * outputs if GATED else outputs)
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
            if GATED:
                lower = tl.load(rows + further + column[None, :], mask=mask, other=0.0)
                second = tl.dot(states, tl.trans(lower), second, input_precision=PRECISION)
        if HAS_BIAS:
            own = bias + expert * (2 * outputs if GATED else outputs) + unit
            product += tl.load(own, mask=kept, other=0.0).to(tl.float32)[None, :]
            if GATED:
                second += tl.load(own + outputs, mask=kept, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION == "clamped":
            gate = tl.minimum(second, limit)
            factor = tl.maximum(tl.minimum(product, limit), -limit) + 1
            product = factor * gate / (1 + tl.exp(-alpha * gate))
        elif GATED:
            product = product * activated(second, ACTIVATION)
        elif ACTIVATION != "":
            product = activated(product, ACTIVATION)
        else:
            product *= tl.load(shares + pair, mask=present, other=0.0)[:, None]
        target = out + pair[:, None] * outputs + unit[None, :]
        tl.store(target, product.to(out.dtype.element_ty), mask=present[:, None] & kept[None, :])


@triton.jit
def _sum_kernel(
    outputs,
    chosen,
    out,
    columns,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add up the outputs of a token's experts; those of another rank were not written."""
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for number in range(CHOSEN):
        pair = token * CHOSEN + number
        mask = (column < columns) & (column * 0 + tl.load(chosen + pair) < EXPERTS)
        total += tl.load(outputs + pair * columns + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


FEW, MANY = 4, 32
"""Pairs of token and expert for each expert, above which products have other tiles."""


def tiles(pairs: int, experts: int, dtype: Any) -> dict[str, int]:
    """Return the tile of the products: ROWS pairs by UNITS outputs, CHUNK inputs at a time. Tuned on an H100."""
    if dtype == torch.float32:
        rows, units, chunk, warps = 16 if pairs <= FEW * experts else 64, 64, 32, 4
    elif pairs <= FEW * experts:
        rows, units, chunk, warps = 16, 32, 256, 4
    elif pairs <= MANY * experts:
        rows, units, chunk, warps = 32, 64, 128, 4
    else:
        rows, units, chunk, warps = 128, 128, 64, 8
    return {"ROWS": rows, "UNITS": units, "CHUNK": chunk, "num_warps": warps, "num_stages": _stages()}


@functools.cache
def _stages() -> int:
    """Return how many tiles are on their way at once: three take up to 147 KB of shared memory, two 98 KB."""
    if not torch.cuda.is_available():
        return 3
    return 3 if torch.cuda.get_device_properties().shared_memory_per_block_optin >= 160 << 10 else 2


def expert_mlp(x: Tensor, matrices: ExpertWeights, chosen: Tensor, weights: Tensor, activation: Activation) -> Tensor:
    """See `Operations.expert_mlp`. The pairs of token and expert are sorted by expert, and tiled expert by expert."""
    chosen, weights = chosen.contiguous(), weights.contiguous()
    tokens, per_token = chosen.shape
    experts, hidden, inside = matrices.inner.shape
    outer_bias, inner_bias, clamp = matrices.outer_bias, matrices.inner_bias, matrices.clamp
    pairs = tokens * per_token
    tile = tiles(pairs, experts, x.dtype)
    order, begins, first_tiles = (
        chosen.new_empty(size, dtype=torch.int32) for size in (pairs, experts + 1, experts + 1)
    )
    bins = triton.next_power_of_2(experts + 1)
    _order_kernel[(experts + 1,)](
        chosen, order, begins, first_tiles, pairs,
        EXPERTS=experts, BINS=bins, ROWS=tile["ROWS"], CHUNK=1024 if pairs <= FEW * experts else 4096, num_warps=4,
        **overlap(),
    )  # fmt: skip
    most_tiles = min(pairs, triton.cdiv(pairs, tile["ROWS"]) + experts)
    settings = {"PRECISION": "ieee", **tile, **overlap()}
    states = x.new_empty((pairs, inside))
    _expert_kernel[(triton.cdiv(inside, tile["UNITS"]), most_tiles)](
        x, matrices.outer, x if outer_bias is None else outer_bias, states, order, weights, begins, first_tiles, hidden,
        inside, experts, per_token, clamp.alpha if clamp else 0.0, clamp.limit if clamp else 0.0,
        ACTIVATION="clamped" if clamp else activation, GATED=matrices.outer.shape[1] != inside,
        HAS_BIAS=outer_bias is not None, **settings,
    )  # fmt: skip
    outputs = x.new_empty((pairs, hidden))
    _expert_kernel[(triton.cdiv(hidden, tile["UNITS"]), most_tiles)](
        states, matrices.inner, x if inner_bias is None else inner_bias, outputs, order, weights, begins, first_tiles,
        inside, hidden, experts, 1, 0.0, 0.0, ACTIVATION="", GATED=False, HAS_BIAS=inner_bias is not None, **settings,
    )  # fmt: skip
    out = torch.empty_like(x)
    _sum_kernel[(tokens, triton.cdiv(hidden, 1024))](
        outputs, chosen, out, hidden, EXPERTS=experts, CHOSEN=per_token, TILE=1024, num_warps=4, **overlap()
    )
    return out

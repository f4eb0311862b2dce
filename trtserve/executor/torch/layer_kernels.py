"""Norms, rotation, gates and products with few rows in the Triton language."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtserve.checkpoint.architectures.base import Activation
from trtserve.executor.torch.operations import HeadNorms, RotationTables
from trtserve.executor.torch.packed import FP8, Fp8Codes


@functools.cache
def overlap() -> dict[str, bool]:
    """Return the launch arguments of a kernel with the parameter OVERLAPS."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Let the next kernel begin, then wait until the one before has ended."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _stored(values, scale, out):
    """Return floats in the type that `out` points to; FP8 ones are divided by the scale."""
    if out.dtype.element_ty == tl.float8e4nv:
        values = tl.clamp(values / tl.load(scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return values.to(out.dtype.element_ty)


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    scale,
    out,
    epsilon,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    mask = column < COLUMNS
    values = tl.load(x + row * COLUMNS + column, mask=mask, other=0.0)
    if ADDS:
        before = tl.load(residual + row * COLUMNS + column, mask=mask, other=0.0)
        values = (values.to(tl.float32) + before.to(tl.float32)).to(values.dtype)
        tl.store(residual + row * COLUMNS + column, values, mask=mask)
    floats = values.to(tl.float32)
    factor = tl.rsqrt(tl.sum(floats * floats, 0) / COLUMNS + epsilon)
    scales = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * COLUMNS + column, _stored(floats * factor * scales, scale, out), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, rounding: Tensor | None = None) -> Tensor:
    """See `Operations.rms_norm`. With `rounding` f32[1] the result is FP8, divided by that."""
    return _norm(x, x, weight, epsilon, rounding, adds=False)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, rounding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `Operations.add_rms_norm` and `rms_norm`. The sum overwrites the residual."""
    return _norm(x, residual, weight, epsilon, rounding, adds=True), residual


def _norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, rounding: Tensor | None, *, adds: bool
) -> Tensor:
    x = x.contiguous()
    columns = x.shape[-1]
    out = torch.empty_like(x, dtype=x.dtype if rounding is None else FP8)
    rows, width = x.numel() // columns, triton.next_power_of_2(columns)
    warps = min(max(width // 512, 1), 16)
    sizes = {"COLUMNS": columns, "WIDTH": width, "ADDS": adds, "num_warps": warps}
    _norm_kernel[(rows,)](x, residual, weight, x if rounding is None else rounding, out, epsilon, **sizes, **overlap())
    return out


@triton.jit
def _rotate_kernel(
    qkv,
    positions,
    cos_sin,
    query_norm,
    key_norm,
    query,
    kv,
    cache_places,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BATCH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Norm, rotate and place BATCH heads of one token."""
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    head, number = tl.program_id(1) * BATCH + tl.arange(0, BATCH), tl.arange(0, WIDTH)
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    mask = (head < ALL)[:, None] & (number < HEAD)[None, :]
    source = qkv + token * (ALL * HEAD) + head[:, None] * HEAD
    raw = tl.load(source + number[None, :], mask=mask, other=0.0)
    values = raw.to(tl.float32)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    factor = tl.zeros([BATCH], tl.float32) + 1.0
    if HAS_NORMS:
        factor = tl.rsqrt(tl.sum(values * values, 1) / HEAD + epsilon)
        weights = _head_weights(query_norm, key_norm, number, is_query, is_value, HEAD)
        values = (values * factor[:, None] * weights).to(raw.dtype).to(tl.float32)
        values = tl.where(is_value[:, None], raw.to(tl.float32), values)
    if ROTATED > 0:
        if INTERLEAVED:
            partner, pair, is_first = number ^ 1, number // 2, number % 2 == 0
        else:
            is_first = number < ROTATED // 2
            partner = tl.where(is_first, number + ROTATED // 2, number - ROTATED // 2)
            pair = number % (ROTATED // 2)
        turns = number < ROTATED
        partner = tl.where(turns, partner, number)
        others = tl.load(source + partner[None, :], mask=mask, other=0.0)
        if HAS_NORMS:
            weights = _head_weights(query_norm, key_norm, partner, is_query, is_value, HEAD)
            others = (others.to(tl.float32) * factor[:, None] * weights).to(raw.dtype)
        row = cos_sin + tl.load(positions + token) * ROTATED
        cosines = tl.load(row + pair, mask=turns, other=1.0)
        sines = tl.load(row + ROTATED // 2 + pair, mask=turns, other=0.0)
        sines = tl.where(is_first, -sines, sines)
        rotated = values * cosines[None, :] + others.to(tl.float32) * sines[None, :]
        values = tl.where(is_value[:, None], values, rotated)
    cache_place = tl.load(cache_places + token)
    block, offset = cache_place // PAGE, cache_place % PAGE
    kv_head = tl.where(is_value, head - KV_HEADS, head) - HEADS
    cached = (block * (2 * PAGE) + offset + tl.where(is_value, PAGE, 0)) * KV_HEADS + kv_head
    result = values.to(raw.dtype)
    tl.store(query + (token * HEADS + head)[:, None] * HEAD + number[None, :], result, mask=mask & is_query[:, None])
    tl.store(kv + cached[:, None] * HEAD + number[None, :], result, mask=mask & (head >= HEADS)[:, None])


@triton.jit
def _head_weights(query_norm, key_norm, number, is_query, is_value, HEAD: tl.constexpr):
    of_query = tl.load(query_norm + number, mask=number < HEAD, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + number, mask=number < HEAD, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], of_query[None, :], of_key[None, :])


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    kv_layer: Tensor,
    cache_places: Tensor,
    *,
    heads: int,
    rotation: RotationTables | None,
    norms: HeadNorms | None,
) -> Tensor:
    tokens = len(qkv)
    page, kv_heads, head = kv_layer.shape[2:]
    query = qkv.new_empty((tokens, heads, head))
    batch = 8
    _rotate_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, batch))](
        qkv,
        positions,
        qkv if rotation is None else rotation.cos_sin,
        qkv if norms is None else norms.query,
        qkv if norms is None else norms.key,
        query,
        kv_layer,
        cache_places,
        0.0 if norms is None else norms.epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD=head,
        WIDTH=triton.next_power_of_2(head),
        PAGE=page,
        ROTATED=0 if rotation is None else rotation.cos_sin.shape[-1],
        INTERLEAVED=rotation is not None and rotation.interleaved,
        HAS_NORMS=norms is not None,
        BATCH=batch,
        num_warps=4,
        **overlap(),
    )
    return query


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1 + tl.exp(-x))
    elif ACTIVATION == "relu":
        return tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1 - 1 / (1 + tl.exp(2 * inner)))  # 0.5 · x · (1 + tanh(inner))


@triton.jit
def _gated_kernel(
    joined,
    scale,
    out,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < COLUMNS
    halves = joined + row * (2 * COLUMNS) + column
    active = tl.load(halves + (COLUMNS if FIRST else 0), mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(halves + (0 if FIRST else COLUMNS), mask=mask, other=0.0).to(tl.float32)
    factor *= activated(active, ACTIVATION).to(joined.dtype.element_ty).to(tl.float32)
    tl.store(out + row * COLUMNS + column, _stored(factor, scale, out), mask=mask)


def gated(
    joined: Tensor, activation: Activation, *, factor_first: bool = False, rounding: Tensor | None = None
) -> Tensor:
    """See `Operations.gated` and `rms_norm`."""
    rows, both = joined.shape
    columns = both // 2
    out = joined.new_empty((rows, columns), dtype=joined.dtype if rounding is None else FP8)
    sizes = {"COLUMNS": columns, "WIDTH": 1024, "FIRST": factor_first, "ACTIVATION": activation}
    _gated_kernel[(rows, triton.cdiv(columns, 1024))](
        joined, joined if rounding is None else rounding, out, **sizes, num_warps=4, **overlap()
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _round_kernel(x, scale, out, count, TILE: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_inputs(OVERLAPS)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    tl.store(out + place, _stored(values, scale, out), mask=place < count)


def rounded(x: Tensor, rounding: Tensor) -> Tensor:
    """Return x / rounding in FP8; `x` as it is if it is FP8 already."""
    if x.dtype == FP8:
        return x
    x, tile = x.contiguous(), 1024 if len(x) < 64 else 4096
    out = torch.empty_like(x, dtype=FP8)
    _round_kernel[(triton.cdiv(x.numel(), tile),)](x, rounding, out, x.numel(), TILE=tile, num_warps=4, **overlap())
    return out


# A matrix of one output, such as the gate of a shared expert, would turn `outputs` into a constant.
@triton.jit(do_not_specialize=["outputs"])
def _vector_kernel(
    x,
    residual,
    total,
    norm,
    weight,
    bias,
    scale,
    input_scale,
    rounding,
    out,
    epsilon,
    columns,
    outputs,
    STRIP: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ADDS: tl.constexpr,
    GATE: tl.constexpr,
    FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply one vector by STRIP rows of `weight`.

    ADDS: the vector is x + residual, which is also stored in `total`. HAS_NORM: it is normed first. GATE: an
    activation, of the product with the rows `outputs` further down if FIRST, else of the product with the first rows;
    both products are multiplied.
    """
    program = tl.program_id(0)
    unit, lane = program * STRIP + tl.arange(0, STRIP), tl.arange(0, CHUNK)
    kept = unit < outputs
    at = weight + unit.to(tl.int64)[:, None] * columns + lane[None, :]
    further = outputs.to(tl.int64) * columns
    # Weights do not depend on the kernels before this one: their first chunk is on its way while those still run.
    chunk = _weights(at, kept, lane, columns, EVEN)
    other = chunk
    if GATE != "":
        other = _weights(at + further, kept, lane, columns, EVEN)
    wait_for_inputs(OVERLAPS)
    product = tl.zeros([STRIP, CHUNK], tl.float32)
    second = tl.zeros([STRIP, CHUNK], tl.float32)
    squares = tl.zeros([CHUNK], tl.float32)
    # Masks are made of blocks only: the interpreter of Triton 3.9 turns a splat boolean into a number.
    for begin in range(0, columns, CHUNK):
        column = begin + lane
        inside = column < columns
        states = tl.load(x + column, mask=inside, other=0.0)
        values = states.to(tl.float32)
        if ADDS:
            values += tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
            states = values.to(states.dtype)
            tl.store(total + column, states, mask=inside & (column * 0 + program == 0))
            values = states.to(tl.float32)
        if HAS_NORM:
            squares += values * values
            values *= tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
        product += chunk.to(tl.float32) * values[None, :]
        following = begin + CHUNK
        ahead = kept & (unit * 0 + following < columns)
        chunk = _weights(at + following, ahead, following + lane, columns, EVEN)
        if GATE != "":
            second += other.to(tl.float32) * values[None, :]
            other = _weights(at + further + following, ahead, following + lane, columns, EVEN)
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / columns + epsilon)
    if x.dtype.element_ty == tl.float8e4nv:
        factor = tl.load(scale) * tl.load(input_scale)
    result = tl.sum(product, 1) * factor
    if HAS_BIAS:
        result += tl.load(bias + unit, mask=kept, other=0.0).to(tl.float32)
    if GATE != "":
        lower = tl.sum(second, 1) * factor
        if HAS_BIAS:
            lower += tl.load(bias + outputs + unit, mask=kept, other=0.0).to(tl.float32)
        if FIRST:
            result = result * activated(lower, GATE)
        else:
            result = activated(result, GATE) * lower
    tl.store(out + unit, _stored(result, rounding, out), mask=kept)


@triton.jit
def _weights(at, kept, column, columns, EVEN: tl.constexpr):
    mask = kept[:, None]
    if not EVEN:
        mask = mask & (column < columns)[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


def multiply_vector(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor | None,
    epsilon: float,
    weight: Tensor | Fp8Codes,
    bias: Tensor | None,
    activation: Activation | None,
    *,
    factor_first: bool,
    rounding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `Operations.norm_linear`, for one row, without `norm` too. The kernel begins before its inputs are there.

    FP8 codes take inputs in FP8, without `norm`.
    """
    x, fp8 = x.contiguous(), weight if isinstance(weight, Fp8Codes) else None
    matrix = weight.codes if isinstance(weight, Fp8Codes) else weight
    columns, outputs = x.shape[1], len(matrix) // (1 if activation is None else 2)
    dtype = x.dtype if fp8 is None else fp8.dtype
    out = x.new_empty((1, outputs), dtype=dtype if rounding is None else FP8)
    total = x if residual is None else torch.empty_like(x)
    # Tuned on an H200 in bfloat16, with the weights of 1.1 B and 8 B models in their place in a decode step.
    strip, chunk = 4, min(triton.next_power_of_2(columns), 1024)
    warps = 4
    if fp8 is not None:  # tuned on an H100
        strip, chunk = 1 if activation else 2, min(triton.next_power_of_2(columns), 2048 if columns > 4096 else 1024)
        warps = 4 if columns > 4096 else 2
    elif columns > 4096:
        strip = 1
    elif activation is None:
        strip = next(size for size in (4, 2, 1) if outputs >= 1280 * size or size == 1)
    _vector_kernel[(triton.cdiv(outputs, strip),)](
        x,
        x if residual is None else residual,
        total,
        x if norm is None else norm,
        matrix,
        x if bias is None else bias,
        x if fp8 is None else fp8.scale,
        x if fp8 is None else fp8.input_scale,
        x if rounding is None else rounding,
        out,
        epsilon,
        columns,
        outputs,
        STRIP=strip,
        CHUNK=chunk,
        EVEN=columns % chunk == 0,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        ADDS=residual is not None,
        GATE=activation or "",
        FIRST=factor_first,
        num_warps=warps,
        **overlap(),
    )
    return out, total

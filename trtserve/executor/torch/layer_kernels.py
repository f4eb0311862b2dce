"""Norms, rotation, gates and products with few rows in the Triton language."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtserve.checkpoint.architectures.base import Activation
from trtserve.checkpoint.quantized import FP8_BLOCK as BLOCK
from trtserve.executor.torch.operations import HeadNorms, RotationTables
from trtserve.executor.torch.packed import FP8, Fp8Codes, Fp8Rows


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
def stored(values, scale, out):
    """Return floats in the type that `out` points to; FP8 ones are divided by the scale."""
    if out.dtype.element_ty == tl.float8e4nv:
        values = tl.clamp(values / tl.load(scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return values.to(out.dtype.element_ty)


@triton.jit
def _store_row(values, scale, out, row, rows, column, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Store `values` at `column` of a row of `out` [rows, COLUMNS], see `stored`.

    With a GROUP, of which there are whole ones in `values`, FP8 codes; `scale` [groups, rows] gets what they are times.
    """
    mask = column < COLUMNS
    if GROUP:
        GROUPS: tl.constexpr = values.shape[0] // GROUP
        parts = tl.reshape(tl.where(mask, values, 0.0), [GROUPS, GROUP])
        own = tl.maximum(tl.max(tl.abs(parts), 1), 1e-12) / 448.0
        number = tl.min(column, 0) // GROUP + tl.arange(0, GROUPS)
        tl.store(scale + number * rows + row, own, mask=number * GROUP < COLUMNS)
        # A quotient may exceed the largest code by a rounding.
        codes = tl.clamp(parts / own[:, None], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        values = tl.reshape(codes, [GROUPS * GROUP]).to(out.dtype.element_ty)
    else:
        values = stored(values, scale, out)
    tl.store(out + row * COLUMNS + column, values, mask=mask)


def _outputs(
    rows: int, columns: int, like: Tensor, rounding: Fp8Codes | None
) -> tuple[Tensor | Fp8Rows, Tensor, Tensor, int]:
    """Return what a kernel makes for the matrix that follows: as a whole, its tensor, the scales and GROUP."""
    if rounding is None:
        out = like.new_empty((rows, columns))
        return out, out, out, 0
    out = like.new_empty((rows, columns), dtype=FP8)
    if rounding.input_scale is not None:
        return out, out, rounding.input_scale, 0
    scales = like.new_empty((-(-columns // rounding.group), rows), dtype=torch.float32)
    return Fp8Rows(out, scales), out, scales, rounding.group


def _group(group: int, width: int) -> int:
    """Return GROUP of a kernel whose programs have `width` numbers: all of them where tokens have one scale."""
    return BLOCK if group == BLOCK else width if group else 0


# The number of warps depends on the rows already: a step of other numbers compiles nothing.
@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x,
    residual,
    weight,
    scale,
    out,
    rows,
    epsilon,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
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
    _store_row(floats * factor * scales, scale, out, row, rows, column, COLUMNS, GROUP)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See `Operations.rms_norm`."""
    normed = norm_rounded(x, None, weight, epsilon, None)
    assert isinstance(normed, Tensor)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """See `Operations.add_rms_norm`. The sum overwrites the residual."""
    normed = norm_rounded(x, residual, weight, epsilon, None)
    assert isinstance(normed, Tensor)
    return normed, residual


def norm_rounded(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, rounding: Fp8Codes | None
) -> Tensor | Fp8Rows:
    """Return the RMS norm of x + residual, rounded for the matrix that follows; the sum overwrites the residual."""
    x = x.contiguous()
    columns = x.shape[-1]
    rows, width = x.numel() // columns, triton.next_power_of_2(columns)
    whole, out, scale, group = _outputs(rows, columns, x, rounding)
    _norm_kernel[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        scale,
        out,
        rows,
        epsilon,
        COLUMNS=columns,
        WIDTH=width,
        GROUP=_group(group, width),
        ADDS=residual is not None,
        # A step of a few rows waits for this kernel.
        num_warps=min(max(width // (256 if rows <= 64 else 512), 1), 16),
        **overlap(),
    )
    return whole if isinstance(whole, Fp8Rows) else out.view(x.shape)


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
    inverse_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
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
    ALL: tl.constexpr = HEADS + PARTS * KV_HEADS
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
    cached = (block * (PARTS * PAGE) + offset + tl.where(is_value, PAGE, 0)) * KV_HEADS + kv_head
    result = values.to(raw.dtype)
    tl.store(query + (token * HEADS + head)[:, None] * HEAD + number[None, :], result, mask=mask & is_query[:, None])
    if kv.dtype.element_ty == tl.float8e4nv:
        result = tl.clamp(result.to(tl.float32) * inverse_scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    result = result.to(kv.dtype.element_ty)
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
    cache_scale: float = 1.0,
) -> Tensor:
    tokens = len(qkv)
    parts, page, kv_heads, head = kv_layer.shape[1:]
    query = qkv.new_empty((tokens, heads, head))
    batch = 8 if head <= 256 else 2
    _rotate_kernel[(tokens, triton.cdiv(heads + parts * kv_heads, batch))](
        qkv,
        positions,
        qkv if rotation is None else rotation.cos_sin,
        qkv if norms is None else norms.query,
        qkv if norms is None else norms.key,
        query,
        kv_layer,
        cache_places,
        0.0 if norms is None else norms.epsilon,
        1 / cache_scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        PARTS=parts,
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
def _rows_kernel(
    x,
    scale,
    out,
    rows,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Store one row of x [rows, COLUMNS], with an ACTIVATION its two halves [rows, 2 · COLUMNS] gated."""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = column < COLUMNS
    if ACTIVATION == "":
        values = tl.load(x + row * COLUMNS + column, mask=mask, other=0.0).to(tl.float32)
    else:
        halves = x + row * (2 * COLUMNS) + column
        active = tl.load(halves + (COLUMNS if FIRST else 0), mask=mask, other=0.0).to(tl.float32)
        values = tl.load(halves + (0 if FIRST else COLUMNS), mask=mask, other=0.0).to(tl.float32)
        values *= activated(active, ACTIVATION).to(x.dtype.element_ty).to(tl.float32)
    _store_row(values, scale, out, row, rows, column, COLUMNS, GROUP)


def gated(joined: Tensor, activation: Activation, *, factor_first: bool = False) -> Tensor:
    """See `Operations.gated`."""
    out = gated_rounded(joined, activation, factor_first=factor_first, rounding=None)
    assert isinstance(out, Tensor)
    return out


def gated_rounded(
    joined: Tensor, activation: Activation, *, factor_first: bool, rounding: Fp8Codes | None
) -> Tensor | Fp8Rows:
    """Return `gated`, rounded for the matrix that follows."""
    return _store_rows(joined, joined.shape[1] // 2, activation, rounding, factor_first=factor_first)


def _store_rows(
    x: Tensor, columns: int, activation: Activation | None, rounding: Fp8Codes | None, *, factor_first: bool = False
) -> Tensor | Fp8Rows:
    rows = len(x)
    whole, out, scale, group = _outputs(rows, columns, x, rounding)
    # One scale for a token needs all of its numbers.
    width = triton.next_power_of_2(columns) if group == columns else 1024
    _rows_kernel[(rows, triton.cdiv(columns, width))](
        x,
        scale,
        out,
        rows,
        COLUMNS=columns,
        WIDTH=width,
        GROUP=_group(group, width),
        FIRST=factor_first,
        ACTIVATION=activation or "",
        num_warps=min(max(width // 512, 4), 16),
        **overlap(),
    )
    return whole


@triton.jit(do_not_specialize=["count"])
def _round_kernel(x, scale, out, count, TILE: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_inputs(OVERLAPS)
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    values = tl.load(x + place, mask=place < count, other=0.0).to(tl.float32)
    tl.store(out + place, stored(values, scale, out), mask=place < count)


def rounded(x: Tensor, matrix: Fp8Codes) -> Tensor | Fp8Rows:
    """Return x [t, in] in FP8, as the matrix that follows needs it."""
    x = x.contiguous()
    if matrix.input_scale is None:
        return _store_rows(x, x.shape[1], None, matrix)
    out, tile = torch.empty_like(x, dtype=FP8), 1024 if len(x) < 64 else 4096
    grid = (triton.cdiv(x.numel(), tile),)
    _round_kernel[grid](x, matrix.input_scale, out, x.numel(), TILE=tile, num_warps=4, **overlap())
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
    tl.store(out + unit, result.to(out.dtype.element_ty), mask=kept)


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
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    *,
    factor_first: bool,
) -> tuple[Tensor, Tensor]:
    """See `Operations.norm_linear`, for one row, without `norm` too. The kernel begins before its inputs are there."""
    x = x.contiguous()
    columns, outputs = x.shape[1], len(weight) // (1 if activation is None else 2)
    out = x.new_empty((1, outputs))
    total = x if residual is None else torch.empty_like(x)
    # Tuned on an H200 in bfloat16, with the weights of 1.1 B and 8 B models in their place in a decode step.
    strip, chunk = 4, min(triton.next_power_of_2(columns), 1024)
    if columns > 4096:
        strip = 1
    elif activation is None:
        strip = next(size for size in (4, 2, 1) if outputs >= 1280 * size or size == 1)
    _vector_kernel[(triton.cdiv(outputs, strip),)](
        x,
        x if residual is None else residual,
        total,
        x if norm is None else norm,
        weight,
        x if bias is None else bias,
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
        num_warps=4,
        **overlap(),
    )
    return out, total

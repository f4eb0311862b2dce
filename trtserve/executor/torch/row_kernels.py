"""Products of a few rows with a matrix of floats or FP8 codes, in the Triton language.

The matrix is read once, as the left side of products of tensor cores, so that a step of a few rows takes as long as its
weights need to arrive. One row of FP8 codes takes this kernel too: it need not turn them into floats.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtserve.checkpoint.architectures.base import Activation
from trtserve.checkpoint.quantized import FP8_BLOCK as BLOCK
from trtserve.executor.torch.layer_kernels import activated, overlap, stored, wait_for_inputs
from trtserve.executor.torch.packed import FP8, Fp8Codes, Fp8Rows

FEW_ROWS = 16
# Of SCALES of `_few_kernel`. PyTorch has faster products of more rows, as steps of an 8 B model on an H200 showed.
_MOST_ROWS = {"": 32, "one": FEW_ROWS, "rows": 64, "blocks": FEW_ROWS}
# Matrices of so many floats, an 8 B model's MLP but not its head, for up to 64 rows.
_LARGE = range(1 << 25, 1 << 28)
_UNITS = 64


@triton.jit
def prefetch(at):
    """Bring what is at these addresses into the L2 cache."""
    code: tl.constexpr = "{prefetch.global.L2 [$1]; mov.b32 $0, 0;}"
    tl.inline_asm_elementwise(code, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def add_parts(product, parts, arrived, place, mask, size, split, SPLITS: tl.constexpr):
    """Return whether this program is the last of a tile, and then the sum of all SPLITS products.

    They meet in `parts` f32[SPLITS, size] at `place`, and are always added in the same order. `arrived` counts the
    programs of the tile, and is 0 again afterwards.
    """
    tl.store(parts + split * size + place, product, mask=mask)
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(arrived, 0)
        product = tl.zeros_like(product)
        for number in tl.static_range(SPLITS):
            product += tl.load(parts + number * size + place, mask=mask, other=0.0, cache_modifier=".cg")
    return last, product


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """Return the counters of `add_parts`, one for each tile; steps on a GPU follow each other."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


# Steps of all sizes share a kernel, and a matrix of one output would turn `outputs` into a constant.
@triton.jit(do_not_specialize=["rows", "outputs"])
def _few_kernel(
    x,
    x_scale,
    weight,
    scale,
    bias,
    rounding,
    parts,
    arrived,
    out,
    rows,
    columns,
    outputs,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    GATE: tl.constexpr,
    FIRST: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply all rows of x [rows, columns] by UNITS rows of a matrix, in one of SPLITS parts of its columns.

    SCALES of FP8 codes: "one" for all with one of the inputs, "rows" with one for each row of both, or "blocks" with
    one for BLOCK inputs and BLOCK × BLOCK codes; else "". GATE, which has no parts, and FIRST: see
    `layer_kernels._vector_kernel`.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    unit, row, lane = tile * UNITS + tl.arange(0, UNITS), tl.arange(0, ROWS), tl.arange(0, CHUNK)
    kept, present = unit < outputs, row < rows
    share = tl.cdiv(tl.cdiv(columns, CHUNK), SPLITS) * CHUNK
    begin, end = split * share, tl.minimum(columns, (split + 1) * share)
    first = weight + unit.to(tl.int64)[:, None] * columns
    further = outputs.to(tl.int64) * columns
    if OVERLAPS:  # the first weights are on their way while the kernels before this one still run
        prefetch(first + begin + tl.arange(0, 1)[None, :])
        if GATE != "":
            prefetch(first + further + begin + tl.arange(0, 1)[None, :])
    wait_for_inputs(OVERLAPS)
    at, states = first + lane[None, :], x + row[None, :] * columns + lane[:, None]
    product = tl.zeros([UNITS, ROWS], tl.float32)
    second = tl.zeros([UNITS, ROWS], tl.float32)
    for column in range(begin, end, CHUNK):
        inside = column + lane < end
        mask = kept[:, None] & inside[None, :]
        values = tl.load(states + column, mask=present[None, :] & inside[:, None], other=0.0)
        chunk = tl.load(at + column, mask=mask, other=0.0, eviction_policy="evict_first")
        product = _added(product, chunk, values, x_scale, scale, column, columns, row, rows, unit, kept, SCALES, BLOCK)
        if GATE != "":
            below = outputs + unit
            chunk = tl.load(at + further + column, mask=mask, other=0.0, eviction_policy="evict_first")
            second = _added(
                second, chunk, values, x_scale, scale, column, columns, row, rows, below, kept, SCALES, BLOCK
            )
    mask = kept[:, None] & present[None, :]
    place = row[None, :] * outputs + unit[:, None]
    last = True
    if SPLITS > 1:
        size = rows.to(tl.int64) * outputs
        last, product = add_parts(product, parts, arrived + tile, place, mask, size, split, SPLITS)
    if last:
        product = _finished(product, x_scale, scale, bias, row, unit, present, kept, 0, SCALES, HAS_BIAS)
        if GATE != "":
            second = _finished(second, x_scale, scale, bias, row, unit, present, kept, outputs, SCALES, HAS_BIAS)
            if FIRST:
                product = product * activated(second, GATE)
            else:
                product = activated(product, GATE) * second
        tl.store(out + place, stored(product, rounding, out), mask=mask)


@triton.jit
def _added(
    product,
    chunk,
    values,
    x_scale,
    scale,
    column,
    columns,
    row,
    rows,
    unit,
    kept,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a product [units, rows] plus that of a chunk of columns."""
    if SCALES == "blocks":
        block = column // BLOCK
        of_rows = tl.load(x_scale + block * rows + row, mask=row < rows, other=0.0)
        of_units = tl.load(scale + unit // BLOCK * tl.cdiv(columns, BLOCK) + block, mask=kept, other=0.0)
        return product + tl.dot(chunk, values) * of_units[:, None] * of_rows[None, :]
    else:
        return tl.dot(chunk, values, product, input_precision="ieee")


@triton.jit
def _finished(
    product, x_scale, scale, bias, row, unit, present, kept, first, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Return a product [units, rows] of units from number `first` on with its scales and bias."""
    if SCALES == "one":
        product *= tl.load(scale) * tl.load(x_scale)
    elif SCALES == "rows":
        product *= tl.load(scale + first + unit, mask=kept, other=0.0)[:, None]
        product *= tl.load(x_scale + row, mask=present, other=0.0)[None, :]
    if HAS_BIAS:
        product += tl.load(bias + first + unit, mask=kept, other=0.0).to(tl.float32)[:, None]
    return product


def is_few(x: Tensor | Fp8Rows, weight: Any) -> bool:
    """Return whether `multiply_few` takes a product. For floats it was measured on Hopper only."""
    if isinstance(weight, Fp8Codes):
        return len(x) <= _MOST_ROWS[_scales(weight)]
    floats = isinstance(weight, Tensor) and weight.dtype.itemsize == 2 and overlap()["OVERLAPS"]
    return floats and len(x) <= (64 if weight.numel() in _LARGE else _MOST_ROWS[""])


def _scales(weight: Fp8Codes) -> str:
    """Return SCALES of `_few_kernel`."""
    return {0: "one", BLOCK: "blocks"}.get(weight.group, "rows")


@functools.cache
def shared_memory() -> int:
    """Return the bytes of shared memory that a program may have: 227 KiB on Hopper, 99 KiB on Ada."""
    if not torch.cuda.is_available():
        return 227 << 10
    return int(torch.cuda.get_device_properties().shared_memory_per_block_optin)


def multiply_few(
    x: Tensor | Fp8Rows,
    weight: Tensor | Fp8Codes,
    bias: Tensor | None,
    activation: Activation | None = None,
    *,
    factor_first: bool = False,
    rounding: Tensor | None = None,
) -> Tensor:
    """Return x [t ≤ 64, in] · weight [out, in]ᵀ + bias, `gated` if there is an activation.

    The x of codes is rounded already. `rounding` f32[1] is the scale of the outputs in FP8.
    """
    fp8 = weight if isinstance(weight, Fp8Codes) else None
    matrix = weight.codes if isinstance(weight, Fp8Codes) else weight
    values, x_scale = (x.codes, x.scales) if isinstance(x, Fp8Rows) else (x.contiguous(), None)
    if fp8 is not None and fp8.input_scale is not None:
        x_scale = fp8.input_scale
    (rows, columns), outputs = values.shape, len(matrix) // (1 if activation is None else 2)
    dtype = values.dtype if fp8 is None else fp8.dtype
    out = values.new_empty((rows, outputs), dtype=dtype if rounding is None else FP8)
    # Tuned on an H200 with the matrices of an 8 B model in their place in a step.
    scales = "" if fp8 is None else _scales(fp8)
    tiles, height = triton.cdiv(outputs, _UNITS), max(16, triton.next_power_of_2(rows))
    if activation or tiles >= 96:
        splits = 1
    else:
        splits = 2 if fp8 is None and tiles >= 64 else 4
    chunk = 128 if scales == "blocks" or (fp8 is None and (splits == 1 or height > 32)) else 256
    if activation:
        stages = 5 if fp8 is not None else 3 if height <= 16 else 4
    else:
        stages = 7 if splits == 1 else 4 if fp8 is not None or chunk == 128 else 3
    size = (_UNITS * (1 if activation is None else 2) + height) * chunk * matrix.dtype.itemsize
    parts = out if splits == 1 else values.new_empty((splits, rows, outputs), dtype=torch.float32)
    _few_kernel[(tiles, splits)](
        values,
        out if x_scale is None else x_scale,
        matrix,
        out if fp8 is None else fp8.scale,
        out if bias is None else bias,
        out if rounding is None else rounding,
        parts,
        arrivals(values.device),
        out,
        rows,
        columns,
        outputs,
        ROWS=height,
        UNITS=_UNITS,
        CHUNK=chunk,
        SPLITS=splits,
        GATE=activation or "",
        FIRST=factor_first,
        SCALES=scales,
        BLOCK=BLOCK,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=max(2, min(stages, (shared_memory() - 1024) // size)),
        **overlap(),
    )
    return out

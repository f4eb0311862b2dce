"""Products of many rows with matrices of FP8 codes: PyTorch's own, and one for scales of blocks."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.quantized import FP8_BLOCK as BLOCK
from trtserve.executor.torch.layer_kernels import overlap, wait_for_inputs
from trtserve.executor.torch.operations import Rows
from trtserve.executor.torch.packed import Fp8Codes, Fp8Rows
from trtserve.executor.torch.plain_operations import multiply_static

# Rows, outputs, warps and stages of a program, by the most rows of a step; and the programs that fill a GPU.
_TILES = ((16, 64, 4, 5), (32, 64, 4, 5), (64, 64, 4, 5), (128, 128, 8, 3))
_PROGRAMS = 264
# PyTorch's product with blocks, which only Hopper has, is faster for more rows.
_LIBRARY_ROWS = 128


@functools.cache
def _is_hopper() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0))


@triton.jit(do_not_specialize=["rows"])
def _blocks_kernel(
    x,
    x_scales,
    codes,
    scales,
    out,
    rows,
    columns,
    outputs,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply ROWS rows of x [rows, columns] by UNITS rows of a matrix, in one of SPLITS parts of its columns.

    out [SPLITS, rows, outputs]. TOGETHER: so many tiles of rows run side by side, so that they share weights in L2.
    """
    wait_for_inputs(OVERLAPS)
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(outputs, UNITS)
    # Programs in turn: all tiles of rows of a band, then the next tile of outputs.
    program, split = tl.program_id(0), tl.program_id(1)
    band = program // (TOGETHER * across)
    height = tl.minimum(down - band * TOGETHER, TOGETHER)
    within = program % (TOGETHER * across)
    row = (band * TOGETHER + within % height) * ROWS + tl.arange(0, ROWS)
    unit = (within // height) * UNITS + tl.arange(0, UNITS)
    lane = tl.arange(0, BLOCK)
    present, kept = row < rows, unit < outputs
    blocks = tl.cdiv(columns, BLOCK)
    share = tl.cdiv(blocks, SPLITS)
    states = x + row.to(tl.int64)[:, None] * columns + lane[None, :]
    weights = codes + unit.to(tl.int64)[None, :] * columns + lane[:, None]
    total = tl.zeros([ROWS, UNITS], tl.float32)
    for block in range(split * share, tl.minimum(blocks, (split + 1) * share)):
        inside = block * BLOCK + lane < columns
        values = tl.load(states + block * BLOCK, mask=present[:, None] & inside[None, :], other=0.0)
        matrix = tl.load(weights + block * BLOCK, mask=kept[None, :] & inside[:, None], other=0.0)
        of_rows = tl.load(x_scales + block * rows + row, mask=present, other=0.0)
        # The rows of a matrix that a program has are in one block.
        of_block = tl.load(scales + tl.min(unit, 0) // BLOCK * blocks + block)
        total += tl.dot(values, matrix) * (of_rows * of_block)[:, None]
    target = out + (split * rows + row).to(tl.int64)[:, None] * outputs + unit[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=present[:, None] & kept[None, :])


def multiply_fp8(x: Rows, weight: Fp8Codes, bias: Tensor | None) -> Tensor:
    """Return the product of inputs that are rounded already."""
    if isinstance(x, Tensor):
        product = multiply_static(x, weight)
    elif weight.scale.ndim > 1:
        product = multiply_blocks(x, weight)
    else:
        product = multiply_rows(x, weight)
    return product if bias is None else product + bias


def multiply_rows(x: Fp8Rows, weight: Fp8Codes) -> Tensor:
    """Return the product with a scale for each token and each output."""
    of_rows = functional.ScalingType.RowWise
    # PyTorch's product with scales of rows gives bfloat16 only.
    product = functional.scaled_mm(
        x.codes,
        weight.codes.T,
        x.scales.view(-1, 1),
        of_rows,
        weight.scale.view(1, -1),
        of_rows,
        output_dtype=torch.bfloat16,
    )
    return product.to(weight.dtype)


def multiply_blocks(x: Fp8Rows, weight: Fp8Codes) -> Tensor:
    """Return the product with a scale for each 128 numbers of a token and each block of 128 × 128."""
    rows, columns = x.codes.shape
    outputs = len(weight.codes)
    # It wants scales in steps of 16 bytes.
    if rows > _LIBRARY_ROWS and rows % 4 == columns % (4 * BLOCK) == outputs % BLOCK == 0 and _is_hopper():
        of_rows, of_blocks = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
        scales = x.scales.T, weight.scale.T
        product = functional.scaled_mm(
            x.codes, weight.codes.T, scales[0], of_rows, scales[1], of_blocks, output_dtype=torch.bfloat16
        )
        return product.to(weight.dtype)
    height, units, warps, stages = next(each for each in _TILES if rows <= each[0] or each is _TILES[-1])
    tiles = triton.cdiv(rows, height) * triton.cdiv(outputs, units)
    splits = next((each for each in (1, 2, 4) if tiles * each >= _PROGRAMS // 2), 4) if rows <= 64 else 1
    dtype = weight.dtype if splits == 1 else torch.float32
    parts = torch.empty((splits, rows, outputs), dtype=dtype, device=x.codes.device)
    _blocks_kernel[(tiles, splits)](
        x.codes,
        x.scales,
        weight.codes,
        weight.scale,
        parts,
        rows,
        columns,
        outputs,
        ROWS=height,
        UNITS=units,
        BLOCK=BLOCK,
        SPLITS=splits,
        TOGETHER=8,
        num_warps=warps,
        num_stages=stages,
        **overlap(),
    )
    return parts[0] if splits == 1 else parts.sum(0).to(weight.dtype)

"""Unpack the inputs of a decode step on the GPU, where they arrive as one array of words of 32 bits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trtserve.executor.torch.draw_words import WORDS
from trtserve.executor.torch.kernel_overlap import overlap, wait_for_inputs

# The words of a row after those of `draw_words`: its token, its position, the length of its sequence with this token
# (0: the row is padding), and where its blocks begin after the words of all rows.
TOKEN, POSITION, LENGTH, FIRST_BLOCK = range(WORDS, WORDS + 4)
STEP_WORDS = WORDS + 4


@triton.jit
def _unpack_kernel(
    packed,
    blocks,
    chosen,
    ids,
    positions,
    slots,
    tables,
    lengths,
    table_stride,
    spare_slot,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0)
    mine = packed + row * WORDS + (WORDS - 4)
    token = tl.load(mine)
    if token < 0:
        token = tl.maximum(tl.load(chosen - 1 - token), 0)
    length = tl.load(mine + 2)
    first = blocks + tl.load(mine + 3)
    tl.store(ids + row, token.to(tl.int64))
    tl.store(positions + row, tl.load(mine + 1).to(tl.int64))
    tl.store(lengths + row, length)
    place = tl.maximum(length - 1, 0)
    block = tl.load(first + place // PAGE, mask=length > 0, other=0)
    slot = tl.where(length > 0, block.to(tl.int64) * PAGE + place % PAGE, spare_slot)
    tl.store(slots + row, slot)
    count = tl.cdiv(length, PAGE)
    for begin in range(0, count, TILE):
        number = begin + tl.arange(0, TILE)
        mask = number < count
        tl.store(tables + row * table_stride + number, tl.load(first + number, mask=mask, other=0), mask=mask)


def unpack_step(
    packed: Tensor,
    rows: int,
    chosen: Tensor,
    *,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    tables: Tensor,
    lengths: Tensor,
    page: int,
    spare_slot: int,
) -> None:
    """Fill the inputs of `rows` sequences from `packed`: i32[rows · STEP_WORDS + blocks of all sequences]."""
    _unpack_kernel[(rows,)](
        packed,
        packed[rows * STEP_WORDS :],
        chosen,
        ids,
        positions,
        slots,
        tables,
        lengths,
        tables.stride(0),
        spare_slot,
        PAGE=page,
        WORDS=STEP_WORDS,
        TILE=256,
        num_warps=4,
        **overlap(),
    )

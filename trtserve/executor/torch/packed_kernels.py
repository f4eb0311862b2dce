"""Products with matrices of 8-bit and 4-bit codes in the Triton language.

One row takes a kernel of its own, as with floats; up to _MOST_ROWS rows multiply the codes as they are read; more are
worth a copy of the matrix as floats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from trtserve.checkpoint.architectures.base import Activation
from trtserve.executor.torch.layer_kernels import activated, overlap, wait_for_inputs
from trtserve.executor.torch.packed import PackedWeight
from trtserve.executor.torch.row_kernels import FEW_ROWS, add_parts, arrivals, prefetch, shared_memory

_MOST_ROWS = 256
_SHAPES = ((16, 32, 2, 1024), (32, 64, 4, 256), (64, 64, 4, 256), (128, 128, 8, 128))
_LARGEST = 224 << 10  # bytes of shared memory that the last one takes for floats of 16 bits


def _pairs(kind: str, magic: str, one: str) -> str:
    """Return PTX that makes eight floats of a word: $0 … $7 of the codes in $8 from the lowest, plus what $9 has twice.

    Codes i and i + 4 are in the two halves of a word shifted by 4 · i. There the bits `magic` make floats of them that
    are 2^m larger (m: the bits of a fraction), which $9 takes away again. All of it is exact.
    """
    made = (
        f"shr.b32 t, $8, {4 * number}; lop3.b32 t, t, 0x000F000F, {magic}, 0xEA; fma.rn.{kind} t, t, o, $9; "
        f"mov.b32 {{${number}, ${number + 4}}}, t; "
        for number in range(4)
    )
    return f"{{ .reg .b32 t, o; mov.b32 o, {one}; {''.join(made)}}}"


_BFLOAT16 = tl.constexpr(_pairs("bf16x2", "0x43004300", "0x3F803F80"))
_FLOAT16 = tl.constexpr(_pairs("f16x2", "0x64006400", "0x3C003C00"))
_OUTPUTS = tl.constexpr(",".join(["=h"] * 8 + ["r", "r"]))


@triton.jit
def _eight(words, zeros, DTYPE: tl.constexpr):
    """Return the eight codes of words of 4-bit codes as floats of 16 bits, less the zero points of the two halves.

    zeros: i32, those of codes 4 … 7 · 2¹⁶ + those of codes 0 … 3.
    """
    if tl.bfloat16 == DTYPE:
        less = zeros - 0x3CFF3D00  # 0xC300 twice: the bits of -128, to whose fraction a zero point adds
        return tl.inline_asm_elementwise(_BFLOAT16, _OUTPUTS, [words, less], (tl.bfloat16,) * 8, is_pure=True, pack=1)
    else:
        less = zeros - 0x1BFF1C00  # 0xE400 twice: -1024
        return tl.inline_asm_elementwise(_FLOAT16, _OUTPUTS, [words, less], (tl.float16,) * 8, is_pure=True, pack=1)


@triton.jit
def _numbers(words, part: tl.constexpr, zero, BITS: tl.constexpr):
    """Return the codes of one part of the words less their zero points, as float32.

    The float whose bits are 0x4B000000 | code is 2²³ + code.
    """
    codes = (words >> (part * BITS)) & ((1 << BITS) - 1)
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)


@triton.jit
def _zeros(zeros, place, mask, scale, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Return the zero points of scales."""
    if HAS_ZEROS:
        return tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
    return scale * 0.0 + (1 << (BITS - 1))


@triton.jit
def _tiny(words, part: tl.constexpr, BITS: tl.constexpr):
    """Return code · 2^(p - 149) of one part of the words u32, whose lowest bit is bit p of the words' half.

    The bits of the code, where they are, are those of a subnormal float, which costs one instruction instead of three.
    Multiplied by an input · 2^(100 - p) it is exact and no longer subnormal.
    """
    AT: tl.constexpr = part * BITS % 16
    half = words >> 16 if part * BITS >= 16 else words
    return (half & (((1 << BITS) - 1) << AT)).to(tl.float32, bitcast=True)


@triton.jit
def _of_groups(
    sums, totals, scales, zeros, place, mask, BITS: tl.constexpr, BLOCKS: tl.constexpr, HAS_ZEROS: tl.constexpr
):
    """Return what the `sums` [strip, words] of inputs times codes give with their blocks' scales and zero points.

    totals [strip, words] are the sums of the inputs alone. Both are 2^49 times too small.
    """
    WORDS: tl.constexpr = sums.shape[1] // BLOCKS
    scale = tl.load(scales + place, mask=mask, other=0.0) * (1 << 49)
    if HAS_ZEROS:
        zero = tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
        of_blocks = tl.sum(tl.reshape(totals, [sums.shape[0], BLOCKS, WORDS]), 2)
        return (tl.sum(tl.reshape(sums, [sums.shape[0], BLOCKS, WORDS]), 2) - zero * of_blocks) * scale
    return tl.sum(tl.reshape(sums - totals * (1 << (BITS - 1)), [sums.shape[0], BLOCKS, WORDS]), 2) * scale


# A matrix of one output would turn `outputs` into a constant.
@triton.jit(do_not_specialize=["outputs"])
def _vector_kernel(
    x,
    codes,
    scales,
    zeros,
    bias,
    out,
    columns,
    outputs,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    SAME: tl.constexpr,
    GROUP: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    FIRST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply one vector by STRIP rows of a matrix, BLOCKS blocks of words at a time.

    SAME parts of a block share a scale. GATE and FIRST: see `layer_kernels._vector_kernel`. With 128 words for every
    warp the threads hold the inputs that belong to their words, and nothing passes through shared memory.
    """
    CHUNK: tl.constexpr = BLOCKS * WORDS
    unit, lane, number = tl.program_id(0) * STRIP + tl.arange(0, STRIP), tl.arange(0, CHUNK), tl.arange(0, BLOCKS)
    kept = unit < outputs
    blocks, groups = columns // (WORDS * PARTS), tl.cdiv(columns, GROUP)
    row = unit.to(tl.int64)
    at = codes + row[:, None] * (blocks * WORDS) + lane[None, :]
    further = outputs.to(tl.int64) * blocks * WORDS
    # The first words are on their way while the kernels before this one still run.
    mask = kept[:, None] & (lane // WORDS < blocks)[None, :]
    chunk = tl.load(at, mask=mask, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    other = chunk
    if GATE != "":
        other = tl.load(at + further, mask=mask, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)
    wait_for_inputs(OVERLAPS)
    product = tl.zeros([STRIP, BLOCKS], tl.float32)
    second = tl.zeros([STRIP, BLOCKS], tl.float32)
    for begin in range(0, blocks, BLOCKS):
        block = begin + lane // WORDS
        inside = block < blocks
        inputs = x + block * (WORDS * PARTS) + lane % WORDS
        ahead = kept[:, None] & (block + BLOCKS < blocks)[None, :]
        following = at + (begin + BLOCKS) * WORDS
        next_chunk = tl.load(following, mask=ahead, other=0, eviction_policy="evict_first")
        next_other = next_chunk
        if GATE != "":
            next_other = tl.load(following + further, mask=ahead, other=0, eviction_policy="evict_first")
        scaled = kept[:, None] & (begin + number < blocks)[None, :]
        for of_group in tl.static_range(PARTS // SAME):
            upper = tl.zeros([STRIP, CHUNK], tl.float32)
            lower = tl.zeros([STRIP, CHUNK], tl.float32)
            total = tl.zeros([CHUNK], tl.float32)
            for of_part in tl.static_range(SAME):
                values = tl.load(inputs + (of_group * SAME + of_part) * WORDS, mask=inside, other=0.0).to(tl.float32)
                total += values * 2.0**-49
                values *= 2.0 ** (100 - (of_group * SAME + of_part) * BITS % 16)
                upper += _tiny(chunk, of_group * SAME + of_part, BITS) * values[None, :]
                if GATE != "":
                    lower += _tiny(other, of_group * SAME + of_part, BITS) * values[None, :]
            totals = tl.broadcast_to(total[None, :], [STRIP, CHUNK])
            group = ((begin + number) * PARTS + of_group * SAME) * WORDS // GROUP
            place = row[:, None] * groups + group[None, :]
            product += _of_groups(upper, totals, scales, zeros, place, scaled, BITS, BLOCKS, HAS_ZEROS)
            if GATE != "":
                place += outputs.to(tl.int64) * groups
                second += _of_groups(lower, totals, scales, zeros, place, scaled, BITS, BLOCKS, HAS_ZEROS)
        chunk, other = next_chunk.to(tl.uint32, bitcast=True), next_other.to(tl.uint32, bitcast=True)
    result = tl.sum(product, 1)
    if HAS_BIAS:
        result += tl.load(bias + unit, mask=kept, other=0.0).to(tl.float32)
    if GATE != "":
        gate = tl.sum(second, 1)
        if HAS_BIAS:
            gate += tl.load(bias + outputs + unit, mask=kept, other=0.0).to(tl.float32)
        if FIRST:
            result = result * activated(gate, GATE)
        else:
            result = activated(result, GATE) * gate
    tl.store(out + unit, result.to(out.dtype.element_ty), mask=kept)


def _sizes(weight: PackedWeight) -> dict[str, int | bool]:
    """Return the arguments of all kernels that say how a matrix is packed."""
    parts, group = 32 // weight.bits, weight.shape[1] // weight.scales.shape[1]
    return {
        "BITS": weight.bits,
        "WORDS": weight.words,
        "PARTS": parts,
        "SAME": min(parts, group // weight.words),
        "GROUP": group,
        "HAS_ZEROS": weight.zeros is not None,
    }


def multiply_packed_vector(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: Activation | None = None,
    *,
    factor_first: bool = False,
) -> Tensor:
    """Return x [1, in] · weight [out, in]ᵀ + bias, `gated` if there is an activation."""
    x = x.contiguous()
    rows, columns = weight.shape
    outputs = rows // (1 if activation is None else 2)
    out = x.new_empty((1, outputs))
    # Tuned on an H100, with the matrices of an 8 B model.
    strip, warps = (8, 4) if activation is None else (4, 1) if weight.bits == 4 else (2, 4)
    _vector_kernel[(triton.cdiv(outputs, strip),)](
        x,
        weight.codes,
        weight.scales,
        weight.codes if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        out,
        columns,
        outputs,
        STRIP=strip,
        BLOCKS=128 * warps // weight.words,  # 16 bytes for every thread
        HAS_BIAS=bias is not None,
        GATE=activation or "",
        FIRST=factor_first,
        num_warps=warps,
        **_sizes(weight),
        **overlap(),
    )
    return out


# Steps of all sizes share a kernel.
@triton.jit(do_not_specialize=["rows"])
def _rows_kernel(
    x,
    codes,
    scales,
    zeros,
    bias,
    parts,
    arrived,
    out,
    rows,
    columns,
    outputs,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    SAME: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAIRS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply ROWS rows of x by UNITS rows of a matrix, in one of SPLITS parts of its columns.

    The codes are the left side of the product: that side may stay in registers. PAIRS: two 4-bit codes become floats of
    16 bits at a time, and what they give is multiplied by the scale of their group afterwards.
    """
    tile, down, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    unit, row, lane = tile * UNITS + tl.arange(0, UNITS), down * ROWS + tl.arange(0, ROWS), tl.arange(0, WORDS)
    kept, present = unit < outputs, row < rows
    blocks = columns // (WORDS * PARTS)
    share = tl.cdiv(blocks, SPLITS)
    first = codes + unit.to(tl.int64)[:, None] * (blocks * WORDS)
    if PAIRS and OVERLAPS:  # the first words are on their way while the kernels before this one still run
        prefetch(first + split * share * WORDS + tl.arange(0, 1)[None, :])
    wait_for_inputs(OVERLAPS)
    at = first + lane[None, :]
    states = x + row.to(tl.int64)[None, :] * columns + lane[:, None]
    group = unit.to(tl.int64) * tl.cdiv(columns, GROUP)
    whole = (lane < WORDS)[:, None] & present[None, :]
    product = tl.zeros([UNITS, ROWS], tl.float32)
    for block in range(split * share, tl.minimum(blocks, (split + 1) * share)):
        chunk = tl.load(at + block * WORDS, mask=kept[:, None] & (lane < WORDS)[None, :], other=0)
        for of_group in tl.static_range(PARTS // SAME):
            place = group + (block * PARTS + of_group * SAME) * WORDS // GROUP
            scale = tl.load(scales + place, mask=kept, other=0.0)
            zero = _zeros(zeros, place, kept, scale, BITS, HAS_ZEROS)[:, None]
            if PAIRS:
                both = tl.broadcast_to(zero.to(tl.int32) * 0x10001, [UNITS, WORDS])
                numbers = _eight(chunk, both, x.dtype.element_ty)
                sums = tl.zeros([UNITS, ROWS], tl.float32)
                for of_part in tl.static_range(SAME):
                    part = of_group * SAME + of_part
                    values = tl.load(states + (block * PARTS + part) * WORDS, mask=whole, other=0.0)
                    sums = tl.dot(numbers[of_group * SAME + of_part], values, sums)
                product += sums * scale[:, None]
            else:
                for of_part in tl.static_range(SAME):
                    part = of_group * SAME + of_part
                    values = tl.load(states + (block * PARTS + part) * WORDS, mask=whole, other=0.0)
                    weights = _numbers(chunk, of_group * SAME + of_part, zero, BITS)
                    if BITS == 4:
                        weights *= scale[:, None]
                    product = tl.dot(weights.to(values.dtype), values, product, input_precision="ieee")
    if BITS == 8:  # a scale for each output
        product *= tl.load(scales + unit, mask=kept, other=0.0)[:, None]
    mask = kept[:, None] & present[None, :]
    place = row.to(tl.int64)[None, :] * outputs + unit[:, None]
    last = True
    if SPLITS > 1:
        size, counter = rows.to(tl.int64) * outputs, arrived + down * tl.num_programs(0) + tile
        last, product = add_parts(product, parts, counter, place, mask, size, split, SPLITS)
    if last:
        if HAS_BIAS:
            product += tl.load(bias + unit, mask=kept, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, product.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _floats_kernel(
    codes,
    scales,
    zeros,
    out,
    columns,
    count,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    SAME: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):
    """Write `count` blocks of codes, of all rows, as floats."""
    block, lane = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, WORDS)
    inside = block < count
    mask = inside[:, None] & (lane < WORDS)[None, :]
    chunk = tl.load(codes + block[:, None] * WORDS + lane[None, :], mask=mask, other=0)
    for of_group in tl.static_range(PARTS // SAME):
        place = (block * PARTS + of_group * SAME) * WORDS // GROUP
        scale = tl.load(scales + place, mask=inside, other=0.0)
        zero = _zeros(zeros, place, inside, scale, BITS, HAS_ZEROS)[:, None]
        for of_part in tl.static_range(SAME):
            target = out + ((block * PARTS + of_group * SAME + of_part) * WORDS)[:, None] + lane[None, :]
            weights = _numbers(chunk, of_group * SAME + of_part, zero, BITS) * scale[:, None]
            tl.store(target, weights.to(out.dtype.element_ty), mask=mask)


def multiply_packed(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """See `Operations.linear`."""
    rows, (outputs, columns) = len(x), weight.shape
    zeros, sizes = weight.codes if weight.zeros is None else weight.zeros, _sizes(weight)
    if rows > _MOST_ROWS or weight.words < 16:  # tensor cores take 16 inputs at a time
        floats = x.new_empty((outputs, columns))
        count, each = weight.codes.numel() // weight.words, max(1, 1024 // weight.words)
        _floats_kernel[(triton.cdiv(count, each),)](
            weight.codes, weight.scales, zeros, floats, columns, count, BLOCKS=each, **sizes
        )
        return functional.linear(x, floats, bias)
    x = x.contiguous()
    pairs = weight.bits == 4 and x.dtype.itemsize == 2
    roomy = x.dtype.itemsize == 2 and shared_memory() > _LARGEST
    shapes = _SHAPES if roomy else _SHAPES[:-1]
    # Tuned on an H100, of one row to 16 rows of 4-bit codes on an H200, with the matrices of an 8 B model: rows, units
    # and warps of a program, and programs in all.
    height, units, warps, programs = next(each for each in shapes if rows <= each[0] or each is shapes[-1])
    if pairs and rows <= FEW_ROWS:
        height, units, warps, programs = FEW_ROWS, 64, 4, 384
    across, down = triton.cdiv(outputs, units), triton.cdiv(rows, height)
    splits = next((each for each in (1, 2, 4) if across * down * each >= programs), 8)
    out = x.new_empty((rows, outputs))
    parts = out if splits == 1 else x.new_empty((splits, rows, outputs), dtype=torch.float32)
    _rows_kernel[(across, down, splits)](
        x,
        weight.codes,
        weight.scales,
        zeros,
        x if bias is None else bias,
        parts,
        arrivals(x.device),
        out,
        rows,
        columns,
        outputs,
        ROWS=height,
        UNITS=units,
        SPLITS=splits,
        HAS_BIAS=bias is not None,
        PAIRS=pairs,
        num_warps=warps,
        num_stages=3,
        **sizes,
        **overlap(),
    )
    return out

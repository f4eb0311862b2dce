"""Paged attention in the Triton language: one kernel for decode steps, one for prompts.

Scores are kept in units of log₂(e), because exp2 is one instruction.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtserve.executor.torch.layer_kernels import overlap, stored, wait_for_inputs
from trtserve.executor.torch.operations import Scores
from trtserve.executor.torch.packed import FP8, Fp8Codes

_LOG2E = 1.4426950408889634
_NO_WINDOW = 1 << 30
# Fewer keys are not worth a program of their own where the rows alone keep the GPU busy.
_LEAST_KEYS = 2048
# Arguments that differ from step to step: a kernel is not compiled again for round numbers among them.
_VARIABLE = ["table_stride", "rows", "parts", "least", "window", "most_items", "most_split"]


@triton.jit
def _scored(products, keys, slopes, scale, cap, HAS_SLOPES: tl.constexpr, HAS_CAP: tl.constexpr):
    """Return the scores of `products` [rows, keys]; `scale` contains log₂(e) unless slopes or a cap follow."""
    scores = products * scale
    if HAS_CAP:
        scores = cap * (1 - 2 / (1 + tl.exp2(scores * (2.8853900817779268 / cap))))  # cap · tanh(scores / cap)
    if HAS_SLOPES:
        scores += slopes[:, None] * keys[None, :].to(tl.float32)
    if HAS_CAP or HAS_SLOPES:
        scores *= 1.4426950408889634
    return scores


@triton.jit
def _of_products(queries, kv):
    """Return queries in the type of products. With an FP8 cache and bfloat16 that is float16, see `_two`."""
    if kv.dtype.element_ty == tl.float8e4nv and queries.dtype == tl.bfloat16:
        queries = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return queries


@triton.jit
def _highest(scores, kv):
    """Return what the weights of each row are relative to: its highest score.

    With an FP8 cache weights reach 2¹⁰, so that float16 only rounds those to 0 that are below 2⁻³⁴ of the largest.
    """
    highest = tl.max(scores, 1)
    if kv.dtype.element_ty == tl.float8e4nv:
        highest -= 10.0
    return highest


_TWO = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 low, high, none; "
    "prmt.b32 t, $2, 0, 0x4420; mov.b32 {low, none}, t; cvt.rn.f16x2.e4m3x2 $0, low; "
    "prmt.b32 t, $2, 0, 0x4431; mov.b32 {high, none}, t; cvt.rn.f16x2.e4m3x2 $1, high; }"
)


@triton.jit
def _two(pairs, DTYPE: tl.constexpr):
    """Return the lower and the upper codes of pairs u16 as floats.

    Tensor cores take values across tokens. Numbers of 16 bits are turned for them as they leave shared memory, single
    codes in two instructions each. A pair of codes becomes float16 in one instruction, bfloat16 in five.
    """
    if tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(_TWO, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        low = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(DTYPE), (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(DTYPE)


@triton.jit(do_not_specialize=_VARIABLE)
def _share_kernel(
    lengths,
    items,
    split,
    rows,
    parts,
    least,
    window,
    most_items,
    most_split,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Share the keys of all rows out among about `parts` parts of at least `least` keys.

    items i32[most_items, 4]: row (-1: there is no such part), first key, end, and whether the row has one part only.
    split i32[most_split, 3]: the rows of several parts, their first parts, and how many (0: there is no such row).
    """
    wait_for_inputs(OVERLAPS)
    row = tl.arange(0, ROWS)
    length = tl.load(lengths + row, mask=row < rows, other=0)
    seen = tl.minimum(length, window)
    if CHUNKED:
        seen = tl.where(length > 0, (length - 1) % window + 1, 0)
    share = tl.maximum(tl.cdiv(tl.sum(seen, 0), parts), least)
    counts = tl.where(row < rows, tl.maximum((2 * seen + share) // (2 * share), 1), 0)
    firsts = tl.cumsum(counts, 0) - counts
    keys = tl.cdiv(tl.cdiv(seen, tl.maximum(counts, 1)), TILE) * TILE
    for part in range(tl.max(counts, 0)):
        at, mask, begin = items + (firsts + part) * 4, part < counts, length - seen + part * keys
        tl.store(at, row, mask=mask)
        tl.store(at + 1, begin, mask=mask)
        tl.store(at + 2, tl.minimum(begin + keys, length), mask=mask)
        tl.store(at + 3, (counts == 1).to(tl.int32), mask=mask)
    several = (counts > 1).to(tl.int32)
    place = split + (tl.cumsum(several, 0) - several) * 3
    tl.store(place, row, mask=counts > 1)
    tl.store(place + 1, firsts, mask=counts > 1)
    tl.store(place + 2, counts, mask=counts > 1)
    for begin in range(tl.sum(counts, 0), most_items, ROWS):
        tl.store(items + (begin + row) * 4, row * 0 - 1, mask=begin + row < most_items)
    for begin in range(tl.sum(several, 0), most_split, ROWS):
        tl.store(split + (begin + row) * 3 + 2, row * 0, mask=begin + row < most_split)


@triton.jit(do_not_specialize=_VARIABLE)
def _decode_kernel(
    query,
    kv,
    tables,
    items,
    slopes,
    sinks,
    partials,
    sums,
    rounding,
    out,
    table_stride,
    scale,
    cap,
    cache_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend from one token with GROUP heads of one key/value head, over a part of its keys (`_share_kernel`).

    From an FP8 cache it loads pairs of neighbours, whose halves are summed apart.
    """
    wait_for_inputs(OVERLAPS)
    SHARING: tl.constexpr = HEADS // KV_HEADS
    GROUPS: tl.constexpr = (SHARING + GROUP - 1) // GROUP
    VALUE: tl.constexpr = HEAD - TURNED
    PARTS: tl.constexpr = 1 if TURNED else 2
    PAIRED: tl.constexpr = 2 if kv.dtype.element_ty == tl.float8e4nv else 1
    item, kv_head = tl.program_id(0), tl.program_id(1) // GROUPS
    row = tl.load(items + item * 4)
    if row >= 0:
        begin, end = tl.load(items + item * 4 + 1), tl.load(items + item * 4 + 2)
        member = tl.program_id(1) % GROUPS * GROUP + tl.arange(0, GROUP)
        number, turned = tl.arange(0, WIDTH), tl.arange(0, TURNED_WIDTH)
        head = kv_head * SHARING + member
        shared, inside = member < SHARING, number < VALUE
        own = query + (row * HEADS + head)[:, None] * HEAD
        queries = tl.load(own + TURNED + number[None, :], mask=shared[:, None] & inside[None, :], other=0.0)
        queries = _of_products(queries, kv)
        turned_queries, upper_queries, units = queries, queries, kv
        if PAIRED == 2:
            queries, upper_queries = tl.split(tl.reshape(queries, [GROUP, WIDTH // 2, 2]))
            units = kv.to(tl.pointer_type(tl.uint16))
        if TURNED:
            turned_queries = tl.load(
                own + turned[None, :], mask=shared[:, None] & (turned < TURNED)[None, :], other=0.0
            )
        slope = tl.zeros([GROUP], tl.float32)
        if HAS_SLOPES:
            slope = tl.load(slopes + head, mask=shared, other=0.0)
        highest = tl.full([GROUP], -1e30, tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        sum_ = tl.zeros([GROUP, WIDTH // PAIRED], tl.float32)
        upper_sum = sum_
        unit = tl.arange(0, WIDTH // PAIRED)
        for start in range(begin, end, TILE):
            keys = start + tl.arange(0, TILE)
            present = keys < end
            block = tl.load(tables + row * table_stride + keys // PAGE, mask=present, other=0).to(tl.int64)
            source = units + (block * (PARTS * PAGE) + keys % PAGE) * (KV_HEADS * HEAD // PAIRED)
            source += kv_head * (HEAD // PAIRED)
            mask = present[:, None] & (unit < VALUE // PAIRED)[None, :]
            key = tl.load(source[:, None] + (TURNED + unit)[None, :], mask=mask, other=0)
            if PAIRED == 2:
                key, upper = _two(key, queries.dtype)
                products = tl.dot(queries, tl.trans(key), input_precision=PRECISION)
                products = tl.dot(upper_queries, tl.trans(upper), products, input_precision=PRECISION)
            else:
                products = tl.dot(queries, tl.trans(key), input_precision=PRECISION)
            if TURNED:
                value = key
                mask = present[:, None] & (turned < TURNED)[None, :]
                turned_key = tl.load(source[:, None] + turned[None, :], mask=mask, other=0.0)
                products = tl.dot(turned_queries, tl.trans(turned_key), products, input_precision=PRECISION)
            else:
                at = source[:, None] + (PAGE * KV_HEADS * HEAD // PAIRED + unit)[None, :]
                value = tl.load(at, mask=mask, other=0)
            scores = _scored(products, keys, slope, scale, cap, HAS_SLOPES, HAS_CAP)
            scores = tl.where(present[None, :], scores, -1e30)
            new = tl.maximum(highest, _highest(scores, kv))
            fade = tl.exp2(highest - new)
            weights = tl.exp2(scores - new[:, None])
            total = total * fade + tl.sum(weights, 1)
            if PAIRED == 2:
                weights = weights.to(queries.dtype)
                value, upper = _two(value, queries.dtype)
                upper_sum = upper_sum * fade[:, None] + tl.dot(weights, upper, input_precision=PRECISION)
            sum_ = sum_ * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
            highest = new
        if PAIRED == 2:
            sum_ = tl.interleave(sum_, upper_sum) * cache_scale
        if tl.load(items + item * 4 + 3) != 0:
            if HAS_SINKS:
                sink = tl.load(sinks + head, mask=shared, other=0.0)
                total += tl.exp2(sink * 1.4426950408889634 - highest)
            result = sum_ / tl.where(total > 0, total, 1.0)[:, None]
            places = (row * HEADS + head)[:, None] * VALUE + number[None, :]
            tl.store(out + places, stored(result, rounding, out), mask=shared[:, None] & inside[None, :])
        else:
            base = item * HEADS + head
            tl.store(partials + base[:, None] * WIDTH + number[None, :], sum_, mask=shared[:, None])
            tl.store(sums + base * 2, highest, mask=shared)
            tl.store(sums + base * 2 + 1, total, mask=shared)


@triton.jit
def _combine_kernel(
    partials,
    sums,
    split,
    sinks,
    rounding,
    out,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add up the parts of one head of a row that has several, PARTS at a time."""
    wait_for_inputs(OVERLAPS)
    own, head = split + tl.program_id(0) * 3, tl.program_id(1)
    count = tl.load(own + 2)
    if count > 0:
        row, first = tl.load(own), tl.load(own + 1)
        number = tl.arange(0, WIDTH)
        most, weight = first * 0.0 - 1e30, first * 0.0
        sum_ = tl.zeros([WIDTH], tl.float32)
        for begin in range(0, count, PARTS):
            part = begin + tl.arange(0, PARTS)
            present = part < count
            base = (first + part) * HEADS + head
            highest = tl.load(sums + base * 2, mask=present, other=-1e30)
            total = tl.load(sums + base * 2 + 1, mask=present, other=0.0)
            parts = tl.load(partials + base[:, None] * WIDTH + number[None, :], mask=present[:, None], other=0.0)
            new = tl.maximum(most, tl.max(highest, 0))
            fade, factors = tl.exp2(most - new), tl.exp2(highest - new)
            weight = weight * fade + tl.sum(total * factors, 0)
            sum_ = sum_ * fade + tl.sum(parts * factors[:, None], 0)
            most = new
        if HAS_SINKS:
            weight += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - most)
        result = sum_ / tl.where(weight > 0, weight, 1.0)
        tl.store(out + (row * HEADS + head) * VALUE + number, stored(result, rounding, out), mask=number < VALUE)


@triton.jit
def _attend_tiles(
    begin,
    end,
    highest,
    total,
    sum_,
    queries,
    turned_queries,
    kv,
    table,
    place,
    limit,
    slope,
    scale,
    cap,
    window,
    kv_head,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    CHUNKED: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to the keys begin … end; all rows see all of them unless MASKED."""
    PARTS: tl.constexpr = 1 if TURNED else 2
    number, turned = tl.arange(0, WIDTH), tl.arange(0, TURNED_WIDTH)
    inside = number < HEAD - TURNED
    for start in range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        if MASKED:
            block = tl.load(table + keys // PAGE, mask=keys < limit, other=0).to(tl.int64)
        else:
            block = tl.load(table + keys // PAGE).to(tl.int64)
        source = kv + (block * (PARTS * PAGE) + keys % PAGE) * (KV_HEADS * HEAD) + kv_head * HEAD
        at = source[:, None] + (TURNED + number)[None, :]
        # Where keys are values too, both are one load.
        if MASKED:
            mask = (keys < limit)[:, None] & inside[None, :]
            key = tl.load(at, mask=mask, other=0.0)
            value = key if TURNED else tl.load(at + PAGE * KV_HEADS * HEAD, mask=mask, other=0.0)
        elif WIDTH == HEAD - TURNED:
            key = tl.load(at)
            value = key if TURNED else tl.load(at + PAGE * KV_HEADS * HEAD)
        else:
            key = tl.load(at, mask=inside[None, :], other=0.0)
            value = key if TURNED else tl.load(at + PAGE * KV_HEADS * HEAD, mask=inside[None, :], other=0.0)
        key, value = key.to(queries.dtype), value.to(queries.dtype)
        products = tl.dot(queries, tl.trans(key), input_precision=PRECISION)
        if TURNED:
            mask = (keys < limit)[:, None] & (turned < TURNED)[None, :]
            turned_key = tl.load(source[:, None] + turned[None, :], mask=mask, other=0.0)
            products = tl.dot(turned_queries, tl.trans(turned_key), products, input_precision=PRECISION)
        scores = _scored(products, keys, slope, scale, cap, HAS_SLOPES, HAS_CAP)
        if MASKED:
            distance = place[:, None] - keys[None, :]
            if CHUNKED:
                farthest = (place % window)[:, None]
            else:
                farthest = window - 1
            scores = tl.where((distance >= 0) & (distance <= farthest), scores, -1e30)
        new = tl.maximum(highest, _highest(scores, kv))
        fade = tl.exp2(highest - new)
        weights = tl.exp2(scores - new[:, None])
        if MASKED:  # a row that sees none of these keys has seen none so far: all its scores are -1e30
            weights = tl.where(scores > -1e29, weights, 0.0)
        total = total * fade + tl.sum(weights, 1)
        sum_ = sum_ * fade[:, None]
        sum_ = tl.dot(weights.to(value.dtype), value, sum_, input_precision=PRECISION)
        highest = new
    return highest, total, sum_


@triton.jit(do_not_specialize=_VARIABLE)
def _prompt_kernel(
    query,
    kv,
    tables,
    past_lengths,
    begins,
    slopes,
    sinks,
    out,
    table_stride,
    scale,
    cap,
    cache_scale,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend from TOKENS new tokens of one sequence, with GROUP heads of one key/value head."""
    wait_for_inputs(OVERLAPS)
    SHARING: tl.constexpr = HEADS // KV_HEADS
    GROUPS: tl.constexpr = (SHARING + GROUP - 1) // GROUP
    VALUE: tl.constexpr = HEAD - TURNED
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the tiles with most keys begin first
    kv_head, sequence = tl.program_id(1) // GROUPS, tl.program_id(2)
    first = tl.load(begins + sequence)
    new = tl.load(begins + sequence + 1) - first
    if tile * TOKENS < new:
        past = tl.load(past_lengths + sequence)
        member, number = tl.arange(0, TOKENS * GROUP), tl.arange(0, WIDTH)
        token = tile * TOKENS + member // GROUP
        sharing = tl.program_id(1) % GROUPS * GROUP + member % GROUP
        head = kv_head * SHARING + sharing
        used, inside = (token < new) & (sharing < SHARING), number < VALUE
        row = ((first + token) * HEADS + head).to(tl.int64)[:, None]
        own = query + row * HEAD
        queries = tl.load(own + TURNED + number[None, :], mask=used[:, None] & inside[None, :], other=0.0)
        queries = _of_products(queries, kv)
        turned_queries = queries
        if TURNED:
            turned = tl.arange(0, TURNED_WIDTH)
            turned_queries = tl.load(own + turned[None, :], mask=used[:, None] & (turned < TURNED)[None, :], other=0.0)
        slope = tl.zeros([TOKENS * GROUP], tl.float32)
        if HAS_SLOPES:
            slope = tl.load(slopes + head, mask=sharing < SHARING, other=0.0)
        place = past + token
        end = past + tl.minimum((tile + 1) * TOKENS, new)
        table = tables + sequence * table_stride
        highest = tl.full([TOKENS * GROUP], -1e30, tl.float32)
        total = tl.zeros([TOKENS * GROUP], tl.float32)
        sum_ = tl.zeros([TOKENS * GROUP, WIDTH], tl.float32)
        if CHUNKED:
            begin = (past + tile * TOKENS) // window * window // TILE * TILE
        elif HAS_WINDOW:
            begin = tl.maximum(past + tile * TOKENS - window + 1, 0) // TILE * TILE
        else:
            begin = (past + tile * TOKENS + 1) // TILE * TILE
            highest, total, sum_ = _attend_tiles(
                0, begin, highest, total, sum_, queries, turned_queries, kv, table, place, end, slope, scale, cap,
                window, kv_head, KV_HEADS, HEAD, TURNED, TURNED_WIDTH, WIDTH, PAGE, TILE, HAS_SLOPES, HAS_CAP,
                CHUNKED, PRECISION, False,
            )  # fmt: skip
        highest, total, sum_ = _attend_tiles(
            begin, end, highest, total, sum_, queries, turned_queries, kv, table, place, end, slope, scale, cap,
            window, kv_head, KV_HEADS, HEAD, TURNED, TURNED_WIDTH, WIDTH, PAGE, TILE, HAS_SLOPES, HAS_CAP,
            CHUNKED, PRECISION, True,
        )  # fmt: skip
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=sharing < SHARING, other=0.0)
            total += tl.exp2(sink * 1.4426950408889634 - highest)
        if kv.dtype.element_ty == tl.float8e4nv:
            sum_ *= cache_scale
        result = sum_ / tl.where(total > 0, total, 1.0)[:, None]
        places = row * VALUE + number[None, :]
        tl.store(out + places, result.to(out.dtype.element_ty), mask=used[:, None] & inside[None, :])


@dataclass(frozen=True)
class SharedKeys:
    """The keys of the rows of a decode step, shared out among programs; see `_share_kernel`."""

    items: Tensor
    split: Tensor
    tile: int


def share_keys(lengths: Tensor, kv_layer: Tensor, most_keys: int, scores: Scores, heads: int) -> SharedKeys:
    """See `Operations.share_keys`.

    All programs of a step run at the same time, one on a multiprocessor for one or two rows (four with an FP8 cache),
    four for up to 16, and two for more. Where the rows are enough for that, only those much longer than the others have
    more than one part.
    """
    rows, (kv_heads, head), window = len(lengths), kv_layer.shape[3:], scores.window
    few = rows <= 2 and kv_layer.dtype != FP8
    programs = kv_heads * (triton.cdiv(heads // kv_heads, _FEW_ROWS) if head - scores.turned > _WIDE else 1)
    parts = max(1, _multiprocessors(lengths.device) * (1 if few else 4 if rows <= 16 else 2) // programs)
    row_bytes = triton.next_power_of_2(head) * max(2, kv_layer.element_size())  # of the numbers in products
    tile = 32 if few or row_bytes > 256 else 64 if row_bytes > 128 else 128
    least = tile if 2 * rows <= parts else _LEAST_KEYS
    # Rounding adds at most half a part to a row, and a row of two parts has three halves of a share.
    items = lengths.new_empty((rows + parts, 4))
    several = 2 * min(most_keys, window or most_keys) >= 3 * least
    split = lengths.new_empty((min(rows, 2 * parts // 3 + 1) if several else 0, 3))
    _share_kernel[(1,)](
        lengths,
        items,
        split,
        rows,
        parts,
        least,
        window or _NO_WINDOW,
        len(items),
        len(split),
        TILE=tile,
        ROWS=next((size for size in (16, 128) if rows <= size), max(1024, triton.next_power_of_2(rows))),
        CHUNKED=scores.chunked and window is not None,
        num_warps=4,
        **overlap(),
    )
    return SharedKeys(items, split, tile)


_WIDE = 256
"""Numbers of a value above which a program takes few rows, so that their sums fit its registers."""
_FEW_ROWS = 16


@functools.cache
def _wide_rows() -> int:
    """Return the rows of a program for wide heads of prompts: Hopper's tensor cores take their operands from memory."""
    return 64 if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else _FEW_ROWS


def _shape(query: Tensor, kv_layer: Tensor, scores: Scores) -> dict[str, Any]:
    """Return the arguments of both kernels that describe heads and scores."""
    _, heads, head = query.shape
    return {
        "HEADS": heads,
        "KV_HEADS": kv_layer.shape[3],
        "HEAD": head,
        "TURNED": scores.turned,
        "TURNED_WIDTH": max(16, triton.next_power_of_2(scores.turned)),
        "WIDTH": max(32 if kv_layer.dtype == FP8 else 16, triton.next_power_of_2(head - scores.turned)),
        "PAGE": kv_layer.shape[2],
        "HAS_SLOPES": scores.slopes is not None,
        "HAS_SINKS": scores.sinks is not None,
        "HAS_CAP": scores.soft_cap is not None,
        "PRECISION": "ieee",
        **overlap(),
    }


def decode_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scores: Scores,
    shared: SharedKeys | None = None,
    rounding: Fp8Codes | None = None,
) -> Tensor:
    """See `Operations.decode_attention`."""
    rows, heads, head = query.shape
    page, kv_heads = kv_layer.shape[2:4]
    if shared is None:
        shared = share_keys(lengths, kv_layer, block_tables.shape[1] * page, scores, heads)
    shape, value, sharing = _shape(query, kv_layer, scores), head - scores.turned, heads // kv_heads
    group, width = max(16, triton.next_power_of_2(sharing)), shape["WIDTH"]
    tile, warps, stages = shared.tile, 4, 2 if shared.tile == 32 else 3
    if value > _WIDE:
        group = _FEW_ROWS
        tile, warps, stages = (16, 8, 1) if query.dtype == torch.float32 else (32, 4, 2)
    scale, count = None if rounding is None else rounding.input_scale, len(shared.items)
    out = query.new_empty((rows, heads, value), dtype=query.dtype if scale is None else FP8)
    scale = query if scale is None else scale
    partials = query.new_empty((count * heads if len(shared.split) else 1, width), dtype=torch.float32)
    sums = query.new_empty((count * heads if len(shared.split) else 1, 2), dtype=torch.float32)
    sinks = query if scores.sinks is None else scores.sinks
    _decode_kernel[(count, kv_heads * triton.cdiv(sharing, group))](
        query,
        kv_layer,
        block_tables,
        shared.items,
        query if scores.slopes is None else scores.slopes,
        sinks,
        partials,
        sums,
        scale,
        out,
        block_tables.stride(0),
        *_factors(scores),
        **shape,
        TILE=tile,
        GROUP=group,
        num_warps=warps,
        num_stages=stages,
    )
    if len(shared.split):
        _combine_kernel[(len(shared.split), heads)](
            partials,
            sums,
            shared.split,
            sinks,
            scale,
            out,
            HEADS=heads,
            VALUE=value,
            WIDTH=width,
            PARTS=16,
            HAS_SINKS=scores.sinks is not None,
            num_warps=1 if width <= _WIDE else 4,
            **overlap(),
        )
    return out


def prompt_attention(
    query: Tensor,
    kv_layer: Tensor,
    block_tables: Tensor,
    past_lengths: Tensor,
    begins: Tensor,
    scores: Scores,
    *,
    most_new: int,
) -> Tensor:
    """See `Operations.prompt_attention`."""
    tokens, heads, head = query.shape
    kv_heads, value = kv_layer.shape[3], head - scores.turned
    shape, sharing = _shape(query, kv_layer, scores), heads // kv_heads
    exact, group = query.dtype == torch.float32, triton.next_power_of_2(sharing)
    if value > _WIDE:
        rows, tile, stages = (_FEW_ROWS, 16, 1) if exact else (_wide_rows(), 32, 2)
        group = min(group, rows)
        warps = 4 if rows == _FEW_ROWS and not exact else 8
    else:
        rows, tile, stages = (64, 32, 2) if exact or shape["WIDTH"] > 128 else (128, 64, 3)
        warps = 8 if max(rows, group) >= 128 else 4
    per_program = max(rows // group, 1)
    out = query.new_empty((tokens, heads, value))
    grid = triton.cdiv(most_new, per_program), kv_heads * triton.cdiv(sharing, group), len(begins) - 1
    _prompt_kernel[grid](
        query,
        kv_layer,
        block_tables,
        past_lengths,
        begins,
        query if scores.slopes is None else scores.slopes,
        query if scores.sinks is None else scores.sinks,
        out,
        block_tables.stride(0),
        *_factors(scores),
        scores.window or _NO_WINDOW,
        **shape,
        TILE=tile,
        TOKENS=per_program,
        GROUP=group,
        HAS_WINDOW=scores.window is not None,
        CHUNKED=scores.chunked and scores.window is not None,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def _factors(scores: Scores) -> tuple[float, float, float]:
    """Return the arguments scale, cap and cache_scale of both kernels."""
    plain = scores.slopes is None and scores.soft_cap is None
    scale = scores.scale * scores.cache_scale * (_LOG2E if plain else 1.0)
    return scale, scores.soft_cap or 1.0, scores.cache_scale


def _multiprocessors(device: Any) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

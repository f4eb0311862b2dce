"""LoRA adapters in the Triton language: each span of tokens multiplies the weights of its adapter, and no others."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtserve.executor.torch.adapters import SPAN, Adapters
from trtserve.executor.torch.layer_kernels import overlap, wait_for_inputs

# Inputs of a program and how many it loads at a time, and outputs of a program, twice as many of wide matrices.
_SHARE, _CHUNK, _TILE = 1024, 512, 256


@triton.jit(do_not_specialize=["span_stride", "tokens", "matrix"])
def _shrink_kernel(
    x,
    spans,
    table,
    inner,
    span_stride,
    tokens,
    columns,
    matrix,
    MATRICES: tl.constexpr,
    RANKS: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply the inputs of a span by 16 rows of in-weights, CHUNKS · CHUNK of their columns."""
    # Where the weights are does not depend on the kernels before this one.
    at = spans + tl.program_id(2) * span_stride
    count, member = tl.load(at + 2), tl.arange(0, SPAN)
    if count == 0 and tl.program_id(2) > 0:  # the first span waits, so that this kernel ends after those before it
        return
    token, split = tl.load(at + 1) + member, tl.program_id(0)
    part, tile = tl.program_id(1) // (RANKS // 16), tl.program_id(1) % (RANKS // 16)
    own = table + (tl.load(at) * MATRICES + matrix + part) * 3
    weights = tl.multiple_of(tl.load(own).to(tl.pointer_type(x.dtype.element_ty)), 16)
    width, rank = tl.load(own + 2), tile * 16 + tl.arange(0, 16)
    wait_for_inputs(OVERLAPS)
    if count > 0 and tile * 16 < width:
        product = tl.zeros([SPAN, 16], tl.float32)
        for number in range(CHUNKS):
            column = (split * CHUNKS + number) * CHUNK + tl.arange(0, CHUNK)
            inside = column < columns
            states = tl.load(
                x + token.to(tl.int64)[:, None] * columns + column[None, :],
                mask=(member < count)[:, None] & inside[None, :],
                other=0.0,
            )
            rows = tl.load(
                weights + rank[:, None] * columns + column[None, :],
                mask=(rank < width)[:, None] & inside[None, :],
                other=0.0,
            )
            product = tl.dot(states, tl.trans(rows), product, input_precision=PRECISION)
        place = ((split * tokens + token) * (tl.num_programs(1) * 16)).to(tl.int64) + part * RANKS
        tl.store(inner + place[:, None] + rank[None, :], product, mask=(member < count)[:, None])


@triton.jit(do_not_specialize=["span_stride", "tokens", "matrix"])
def _expand_kernel(
    inner,
    spans,
    table,
    product,
    span_stride,
    product_stride,
    tokens,
    outputs,
    matrix,
    MATRICES: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add the product of what `_shrink_kernel` made with TILE columns of out-weights."""
    at = spans + tl.program_id(2) * span_stride
    count, member = tl.load(at + 2), tl.arange(0, SPAN)
    if count == 0 and tl.program_id(2) > 0:
        return
    token, part, lane = tl.load(at + 1) + member, tl.program_id(1), tl.arange(0, 16)
    own = table + (tl.load(at) * MATRICES + matrix + part) * 3
    width = tl.load(own + 2).to(tl.int32)
    weights = tl.multiple_of(tl.load(own + 1).to(tl.pointer_type(product.dtype.element_ty)), 16)
    wait_for_inputs(OVERLAPS)
    if count > 0:
        column = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside, present = column < outputs, member < count
        target = product + token.to(tl.int64)[:, None] * product_stride + part * outputs + column[None, :]
        mask = present[:, None] & inside[None, :]
        total = tl.load(target, mask=mask, other=0.0).to(tl.float32)
        row = (token * (tl.num_programs(1) * RANKS)).to(tl.int64) + part * RANKS
        step = (tokens * (tl.num_programs(1) * RANKS)).to(tl.int64)
        for begin in range(0, width, 16):
            rank = begin + lane
            rows = tl.load(
                weights + rank[:, None] * outputs + column[None, :],
                mask=(rank < width)[:, None] & inside[None, :],
                other=0.0,
            )
            states = tl.zeros([SPAN, 16], tl.float32)
            for split in range(SPLITS):
                place = row + split * step
                states += tl.load(inner + place[:, None] + rank[None, :], mask=present[:, None], other=0.0)
            total = tl.dot(states.to(rows.dtype), rows, total, input_precision=PRECISION)
        tl.store(target, total.to(product.dtype.element_ty), mask=mask)


def begin_adapters(x: Tensor, adapters: Adapters, layer: int, matrix: int, parts: int) -> Callable[[Tensor], None]:
    """See `Operations.begin_adapters`. The inputs are divided, so that few spans keep the GPU busy too."""
    store, spans, x = adapters.store, adapters.spans, x.contiguous()
    table = store.table[layer - store.layers.start]
    tokens, columns = x.shape
    ranks = triton.cdiv(max(store.ranks[name] for name in store.matrices[matrix : matrix + parts]), 16) * 16
    chunk = 32 if x.dtype == torch.float32 else _CHUNK
    chunks, splits = _SHARE // chunk, triton.cdiv(columns, _SHARE)
    inner = x.new_empty((splits, tokens, parts * ranks), dtype=torch.float32)
    apart = _stream(x.device) if adapters.beside else None
    settings = {
        "MATRICES": len(store.matrices),
        "RANKS": ranks,
        "SPAN": SPAN,
        "PRECISION": "ieee",
        "num_warps": 4,
        # A kernel that waits for another stream begins when that has ended.
        **(overlap() if apart is None else {"OVERLAPS": False}),
    }
    if apart is not None:
        apart.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(apart):
        _shrink_kernel[(splits, parts * ranks // 16, len(spans))](
            x, spans, table, inner, spans.stride(0), tokens, columns, matrix, CHUNK=chunk, CHUNKS=chunks, **settings
        )

    def add(product: Tensor) -> None:
        if apart is not None:
            torch.cuda.current_stream().wait_stream(apart)
        outputs = product.shape[1] // parts
        # Tuned on an H200 with the matrices of an 8 B model, 16 adapters and 64 tokens.
        tile = 128 if x.dtype == torch.float32 else _TILE if outputs < 8192 else 2 * _TILE
        _expand_kernel[(triton.cdiv(outputs, tile), parts, len(spans))](
            inner,
            spans,
            table,
            product,
            spans.stride(0),
            product.stride(0),
            tokens,
            outputs,
            matrix,
            SPLITS=splits,
            TILE=tile,
            **settings,
        )

    return add


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for products beside those of the layers."""
    return torch.cuda.Stream(device)

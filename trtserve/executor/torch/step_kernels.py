"""Kernels of a decode step around its layers: unpack its inputs, and choose its tokens.

The inputs arrive as one array of words of 32 bits. Tokens are chosen from the words of `draw_words`, as
`engine.sampling` does on the host."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtserve.executor.torch.draw_words import WORDS
from trtserve.executor.torch.layer_kernels import overlap, wait_for_inputs

_CHUNK = 4096
_FOUND = 2048


@triton.jit
def _chunk_kernel(
    logits,
    words,
    table,
    allowed,
    highest,
    first,
    sums,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Process a chunk of a row in place; find its largest logit, and the sum of exponentials relative to that."""
    wait_for_inputs(OVERLAPS)
    row, chunk = tl.program_id(0), tl.program_id(1)
    mine = words + row * WORDS
    flags = tl.load(mine)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < vocabulary
    at = logits + row.to(tl.int64) * vocabulary + token
    values = tl.load(at, mask=mask, other=float("-inf"))
    if (flags & 2) != 0:
        values = tl.div_rn(values, tl.load(mine + 7).to(tl.float32, bitcast=True))
        entry = tl.load(mine + 5)
        if entry >= 0:
            occurred = tl.load(table + entry.to(tl.int64) * vocabulary + token, mask=mask, other=0).to(tl.int32)
            repetition = tl.load(mine + 10).to(tl.float32, bitcast=True)
            presence = tl.load(mine + 11).to(tl.float32, bitcast=True)
            frequency = tl.load(mine + 12).to(tl.float32, bitcast=True)
            punished = tl.where(values < 0, values * repetition, tl.div_rn(values, repetition))
            values = tl.where(occurred > 0, punished, values)
            values = tl.where(occurred > 1, values - presence, values)
            values = tl.where(occurred > 1, values - frequency * (occurred - 1).to(tl.float32), values)
            values = tl.where(occurred < 0, float("-inf"), values)
        guarded = tl.load(mine + 6)
        values = tl.where(token == guarded, -3.4028234663852886e38, values)
        if (flags & 16) != 0:
            own = allowed + tl.load(mine + 13).to(tl.int64) * tl.cdiv(vocabulary, 32)
            bits = tl.load(own + token // 32, mask=mask, other=0)
            values = tl.where(((bits >> (token % 32)) & 1) != 0, values, float("-inf"))
        tl.store(at, values, mask=mask)
    undefined = tl.max((values != values).to(tl.int32), 0)
    top = tl.max(values, 0)
    index = tl.min(tl.where(values == top, token, 2147483647), 0)
    place = row * chunks + chunk
    if (flags & 5) != 0:
        floor = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sums + place, tl.sum(tl.exp(values - floor).to(tl.float64), 0))
    tl.store(highest + place, tl.where(undefined != 0, float("nan"), top))
    tl.store(first + place, index)


@triton.jit
def _mix(state):
    """The finaliser of SplitMix64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _uniform(mine):
    """Return the random number f64 of a row: a function of its seed and the number of tokens before this one."""
    low = tl.load(mine + 2).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(mine + 3).to(tl.uint32, bitcast=True).to(tl.uint64)
    number = tl.load(mine + 4).to(tl.uint64)
    state = _mix((high << 32) | low) + (number + 1) * 0x9E3779B97F4A7C15
    return (_mix(state) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _weights(values, top, min_p):
    """Return the probabilities of `values` relative to that of the largest, f32; 0 below min_p."""
    weights = tl.exp(tl.maximum(values - top, -200.0))
    return tl.where((values > top - 87.0) & (weights >= min_p), weights, 0.0)


@triton.jit
def _row_sums(at, vocabulary, pivot, top, min_p, CHUNK: tl.constexpr):
    """Return the number of the row's values from `pivot` on that have weight, and the sum of their weights."""
    count = tl.zeros([CHUNK], tl.int32)
    mass = tl.zeros([CHUNK], tl.float64)
    for begin in range(0, vocabulary, CHUNK):
        token = begin + tl.arange(0, CHUNK)
        values = tl.load(at + token, mask=token < vocabulary, other=float("-inf"))
        weights = _weights(values, top, min_p)
        weights = tl.where(values >= pivot, weights, 0.0)
        count += (weights > 0).to(tl.int32)
        mass += weights.to(tl.float64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _value_reaching(values, amounts, wanted):
    """Return the largest of `values` so that the amounts of it and of all larger ones add up to `wanted` or more.

    Values without weight are -∞. Also returns the sum of the amounts of the larger ones.
    """
    high = tl.max(values, 0)
    low = tl.min(tl.where(values == float("-inf"), high, values), 0)
    before = tl.sum(amounts, 0) * 0
    reached = tl.sum(tl.where(values >= high, amounts, 0.0), 0)
    done = (reached >= wanted) | (low >= high)
    low = tl.where(reached >= wanted, high, low)
    before = tl.where(reached >= wanted, before, tl.where(low >= high, before, reached))
    while not done:
        middle = low + (high - low) * 0.5
        inside = values >= middle
        sum_ = tl.sum(tl.where(inside, amounts, 0.0), 0)
        above = tl.min(tl.where(inside, values, float("inf")), 0)
        below = tl.max(tl.where(inside, float("-inf"), values), 0)
        apart = (middle > low) & (middle < high)
        enough = sum_ >= wanted
        done = (not apart) | ((not enough) & (below <= low))
        before = tl.where(apart & (not enough), sum_, before)
        high = tl.where(apart & (not enough), middle, high)
        low = tl.where(apart & enough, above, low)
    return low, before


@triton.jit
def _sample(at, mine, found, top, total, vocabulary, CHUNK: tl.constexpr, FOUND: tl.constexpr):
    """Choose a token like `sampling._pick`: the first whose running sum, in descending order, reaches u · p · sum.

    Returns the token and the sum of the weights that it was chosen from.
    """
    top_k = tl.load(mine + 1)
    top_p = tl.load(mine + 8).to(tl.float32, bitcast=True).to(tl.float64)
    min_p = tl.load(mine + 9).to(tl.float32, bitcast=True)
    # Sums of other orders differ by rounding: what is asked for must not exceed any of them.
    share = tl.minimum(_uniform(mine) * top_p, 1 - 2e-6)
    wanted = share * total
    # Narrow the row to few values: all above a bound for top-k, else those around the one that reaches `wanted`.
    low, high = top - 88.0, top + 1.0
    before = wanted * 0
    inside = vocabulary
    skipped = 0
    pivot = top - 6.0
    while inside > FOUND:
        count, mass = _row_sums(at, vocabulary, pivot, top, min_p, CHUNK)
        if top_k > 0:
            enough = count >= top_k
        else:
            enough = mass >= wanted
        if enough:
            low = pivot
            inside = count - skipped
        else:
            high = pivot
            before = mass
            if top_k == 0:
                inside -= count - skipped
                skipped = count
        pivot = low + (high - low) * 0.5
        if (pivot <= low) | (pivot >= high):
            inside = tl.minimum(inside, FOUND)  # equal values: the first of them in the vocabulary are enough
        elif (not enough) & (high <= top - 87.0):
            inside = tl.minimum(inside, FOUND)  # fewer than top_k have weight
    # For top-k the values above `high` come first: fewer than top_k, so that they all have a place.
    kept = 0
    for part in range(tl.where(top_k > 0, 0, 1), 2):
        for begin in range(0, vocabulary, CHUNK):
            token = begin + tl.arange(0, CHUNK)
            values = tl.load(at + token, mask=token < vocabulary, other=float("-inf"))
            keep = tl.where(part == 0, values >= high, (values >= low) & (values < high))
            keep = keep & (_weights(values, top, min_p) > 0)
            place = kept + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(found + place, values, mask=keep & (place < FOUND))
            kept += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()
    number = tl.arange(0, FOUND)
    best = tl.load(found + number, mask=number < kept, other=float("-inf"))
    masses = _weights(best, top, min_p).to(tl.float64)
    chosen_from = total
    if top_k > 0:
        ones = tl.where(masses > 0, 1.0, 0.0).to(tl.float64)
        last, larger = _value_reaching(best, ones, top_k.to(tl.float64))
        above = tl.sum(tl.where(best > last, masses, 0.0), 0)
        equal = tl.sum(tl.where(best == last, ones, 0.0), 0)
        each = tl.max(tl.where(best == last, masses, 0.0), 0)
        chosen_from = above + each * tl.minimum(equal, top_k.to(tl.float64) - larger)
        wanted = share * chosen_from
        before = wanted * 0
    value, larger = _value_reaching(best, masses, wanted - before)
    each = tl.max(tl.where(best == value, masses, 0.0), 0)
    # Among equal values the lower token comes first: take the nth of them.
    nth = tl.maximum(tl.ceil((wanted - before - larger) / each), 1.0).to(tl.int32)
    seen = 0
    chosen = 0
    for begin in range(0, vocabulary, CHUNK):
        token = begin + tl.arange(0, CHUNK)
        values = tl.load(at + token, mask=token < vocabulary, other=float("-inf"))
        equal = (values == value) & (token < vocabulary)
        order = seen + tl.cumsum(equal.to(tl.int32), 0)
        chosen = tl.maximum(chosen, tl.max(tl.where(equal & (order <= nth), token, 0), 0))
        seen += tl.sum(equal.to(tl.int32), 0)
    return chosen, chosen_from


@triton.jit
def _choose_kernel(
    logits,
    words,
    table,
    highest,
    first,
    sums,
    found,
    tokens,
    log_probs,
    vocabulary,
    chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    FOUND: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Choose the token of a row, its log-probabilities if they are wanted, and count the token for the penalties."""
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0)
    mine = words + row * WORDS
    flags = tl.load(mine)
    chunk = tl.arange(0, CHUNKS)
    tops = tl.load(highest + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    firsts = tl.load(first + row * chunks + chunk, mask=chunk < chunks, other=2147483647)
    is_undefined = tl.max((tops != tops).to(tl.int32), 0) != 0
    top = tl.max(tops, 0)
    token = tl.min(tl.where(tops == top, firsts, 2147483647), 0)
    if is_undefined | (top == float("inf")):
        token = -1
    elif top == float("-inf"):
        token = tl.where((flags & 2) != 0, -2, -1)
    elif (flags & 5) != 0:
        at = logits + row.to(tl.int64) * vocabulary
        partial = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0)
        total = tl.sum(tl.where(tops == float("-inf"), 0.0, partial * tl.exp(tops - top).to(tl.float64)), 0)
        min_p = tl.load(mine + 9).to(tl.float32, bitcast=True)
        if min_p > 0:
            _, total = _row_sums(at, vocabulary, top - 87.0, top, min_p, CHUNK)
        chosen_from = total
        if (flags & 1) != 0:
            token, chosen_from = _sample(at, mine, found + row * FOUND, top, total, vocabulary, CHUNK, FOUND)
        if (flags & 4) != 0:
            offset = (tl.load(at + token) - top).to(tl.float64)
            full = offset - tl.log(total)
            tl.store(log_probs + row * 2 + 1, full.to(tl.float32))
            if (flags & 8) != 0:
                full = offset - tl.log(chosen_from)
            tl.store(log_probs + row * 2, full.to(tl.float32))
    tl.store(tokens + row, token)
    entry = tl.load(mine + 5)
    if ((flags & 2) != 0) & (entry >= 0) & (token >= 0):
        place = table + entry.to(tl.int64) * vocabulary + token
        count = tl.minimum(tl.maximum(tl.load(place).to(tl.int32), 1) + 1, 32767)
        tl.store(place, count.to(table.dtype.element_ty))


class KernelSampler:
    """Chooses tokens for up to `rows` rows of logits f32[r, vocabulary]; all of it can be captured in a CUDA graph."""

    def __init__(self, rows: int, vocabulary: int, device: Any) -> None:
        self._chunks = triton.cdiv(vocabulary, _CHUNK)
        self._vocabulary = vocabulary
        self._highest = torch.empty((rows, self._chunks), dtype=torch.float32, device=device)
        self._first = torch.empty((rows, self._chunks), dtype=torch.int32, device=device)
        self._sums = torch.empty((rows, self._chunks), dtype=torch.float64, device=device)
        self._found = torch.empty((rows, _FOUND), dtype=torch.float32, device=device)

    def choose(
        self, logits: Tensor, words: Tensor, table: Tensor, allowed: Tensor, tokens: Tensor, log_probs: Tensor
    ) -> None:
        """Write the tokens i32[r] and (log-prob, full log-prob) f32[r, 2] of the rows; `logits` are processed in place.

        words i32[r, WORDS], table i16[slots, vocabulary] and the bits `allowed` i32[guides, ⌈vocabulary / 32⌉] are
        described in `draw_words`; what is chosen is counted.
        """
        rows = len(logits)
        settings = {"WORDS": words.shape[1], **overlap()}
        scratch = (self._highest, self._first, self._sums)
        _chunk_kernel[(rows, self._chunks)](
            logits,
            words,
            table,
            allowed,
            *scratch,
            self._vocabulary,
            self._chunks,
            CHUNK=_CHUNK,
            num_warps=8,
            **settings,
        )
        _choose_kernel[(rows,)](
            logits,
            words,
            table,
            *scratch,
            self._found,
            tokens,
            log_probs,
            self._vocabulary,
            self._chunks,
            CHUNKS=triton.next_power_of_2(self._chunks),
            CHUNK=_CHUNK,
            FOUND=_FOUND,
            num_warps=16,
            **settings,
        )


# The words of a row after those of `draw_words`: its token, its position, the length of its sequence with this token
# (0: the row is padding), where its blocks begin after the words of all rows, its row of states; then a span of
# adapters (`adapters.Spans`) that has nothing to do with the row.
TOKEN, POSITION, LENGTH, FIRST_BLOCK, STATE, FIRST_SPAN = range(WORDS, WORDS + 6)
STEP_WORDS = FIRST_SPAN + 3


@triton.jit
def _unpack_kernel(
    packed,
    blocks,
    chosen,
    ids,
    positions,
    cache_places,
    tables,
    lengths,
    table_stride,
    spare_place,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0)
    mine = packed + row * WORDS + (WORDS - 8)
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
    cache_place = tl.where(length > 0, block.to(tl.int64) * PAGE + place % PAGE, spare_place)
    tl.store(cache_places + row, cache_place)
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
    cache_places: Tensor,
    tables: Tensor,
    lengths: Tensor,
    page: int,
    spare_place: int,
) -> None:
    """Fill the inputs of `rows` sequences from `packed`: i32[rows · STEP_WORDS + blocks of all sequences]."""
    _unpack_kernel[(rows,)](
        packed,
        packed[rows * STEP_WORDS :],
        chosen,
        ids,
        positions,
        cache_places,
        tables,
        lengths,
        tables.stride(0),
        spare_place,
        PAGE=page,
        WORDS=STEP_WORDS,
        TILE=256,
        num_warps=4,
        **overlap(),
    )

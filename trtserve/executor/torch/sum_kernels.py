"""Sums over the GPUs of one host, which write their summands into each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtserve.executor.torch.layer_kernels import overlap, wait_for_inputs

# Every GPU writes its summand to all others, so that more GPUs take smaller tensors. Two take those of up to 4 MiB.
_ALL_BYTES: Final = 8 * 2**20
_TILE_BYTES: Final = 2048
"""Of a program."""
_PIECE_BYTES: Final = 16
"""Of a thread's load."""
_EMPTY: Final = {2: -(2**15), 4: -(2**31) + 2**15}
"""What a place holds that nothing was written to, by the bytes of a number: 16-bit words of −0.0."""
_BITS: Final = {2: tl.int16, 4: tl.int32}
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["pieces"])
def _sum_kernel(
    x,
    out,
    buffers,
    turns,
    pieces,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PLACES: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    BITS: tl.constexpr,
    EMPTY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum the x [pieces · PIECE] of RANKS ranks into out.

    buffers [RANKS]: addresses of each rank's places [2, RANKS, PLACES] for summands. A program takes the halves in
    turn: when a rank writes to a half again, the others have sent the summand between, and so have emptied it.
    turns [PLACES / TILE]: how often each program has run.
    """
    wait_for_inputs(OVERLAPS)
    program = tl.program_id(0)
    place = program * TILE + tl.arange(0, TILE)
    inside = place < pieces * PIECE
    turn = tl.load(turns + program)
    half = turn % 2 * (RANKS * PLACES)
    values = tl.load(x + place, mask=inside, other=0.0)
    bits = values.to(BITS, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            target = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(BITS)), 16)
            tl.store(target + half + RANK * PLACES + place, bits, mask=inside)
    own = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(BITS)), 16)
    total = tl.zeros([TILE], tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += values.to(tl.float32)
        else:
            source = own + half + peer * PLACES + place
            sent = tl.load(source, mask=inside, other=0, volatile=True)
            while tl.max((sent == EMPTY).to(tl.int32), 0) != 0:
                sent = tl.load(source, mask=inside, other=0, volatile=True)
            tl.store(source, EMPTY, mask=inside)
            total += sent.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
    tl.store(turns + program, turn + 1)


class GpuSums:
    """All-reduce for tensors of a decode step, in a tenth to a third of NCCL's time (docs/gpu.md).

    `places` uint8[2 · ranks · n] are those of this rank, and `addresses` those of all ranks; see `_sum_kernel`.
    """

    def __init__(self, places: Tensor, addresses: Sequence[int], rank: int) -> None:
        self._rank, self._ranks = rank, len(addresses)
        self._most = places.nbytes // (2 * self._ranks)
        self._places = places
        self._buffers = torch.tensor(addresses, dtype=torch.int64, device=places.device)
        self._turns = torch.zeros(self._most // _TILE_BYTES, dtype=torch.int32, device=places.device)
        places.view(torch.int16).fill_(_EMPTY[2])

    @classmethod
    def of_group(cls, group: Any, device: torch.device) -> GpuSums:
        """Return the sums of GPUs of one host; all of them have to be there before the first sum.

        Raises RuntimeError when they cannot write to each other's memory.
        """
        from torch.distributed import _symmetric_memory as symmetric_memory  # the only name that PyTorch gives it

        most = _ALL_BYTES // group.size() // _TILE_BYTES * _TILE_BYTES
        places = symmetric_memory.empty(2 * group.size() * most, dtype=torch.uint8, device=device)
        return cls(places, symmetric_memory.rendezvous(places, group).buffer_ptrs, group.rank())

    def fit(self, x: Tensor) -> bool:
        """Return whether the tensor is of a size and type that this kernel takes."""
        return x.dtype in _DTYPES and x.nbytes <= self._most and x.nbytes % _PIECE_BYTES == 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x; every rank adds them in the same order, in float32."""
        x = x.contiguous()
        out, width = torch.empty_like(x), x.element_size()
        tile = _TILE_BYTES // width
        _sum_kernel[(triton.cdiv(x.numel(), tile),)](
            x,
            out,
            self._buffers,
            self._turns,
            x.nbytes // _PIECE_BYTES,
            RANK=self._rank,
            RANKS=self._ranks,
            PLACES=self._most // width,
            TILE=tile,
            PIECE=_PIECE_BYTES // width,
            BITS=_BITS[width],
            EMPTY=_EMPTY[width],
            num_warps=4,
            **overlap(),
        )
        return out

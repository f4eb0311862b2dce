"""Sums of small tensors over the GPUs of one host, in one kernel that reads the other GPUs' memory."""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

# Every GPU reads all summands, so that more GPUs take smaller tensors. Two take those of up to 1 MiB.
_ALL_BYTES: Final = 2 * 2**20
# Numbers are read 16 bytes at a time, and PyTorch has this kernel for two types.
_ALIGNED: Final = 16
_DTYPES: Final = (torch.float32, torch.bfloat16)


class OneShotSums:
    """All-reduce for tensors of a decode step, for which it takes about half of NCCL's time (docs/gpu.md).

    Raises RuntimeError when the GPUs of the group cannot read each other's memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory  # the only name that PyTorch gives it

        bytes_each = _ALL_BYTES // group.size() // _ALIGNED * _ALIGNED
        self._summand: Tensor = symmetric_memory.empty(bytes_each, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._summand, group)
        self._group = group.group_name

    def fit(self, x: Tensor) -> bool:
        """Return whether the tensor is of a size and type that this kernel takes."""
        return x.dtype in _DTYPES and x.nbytes <= self._summand.nbytes and x.nbytes % _ALIGNED == 0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x; every rank adds them in the same order."""
        summand = self._summand[: x.nbytes].view(x.dtype).view(x.shape)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(summand, x.contiguous(), "sum", self._group)
        return total


def one_shot_sums(group: Any, device: torch.device) -> OneShotSums | None:
    """Return the sums of a group of GPUs of one host, or None when a rank cannot take part."""
    found = None
    try:
        found = OneShotSums(group, device)
    except RuntimeError as error:
        logger.info("NCCL sums all tensors, because the GPUs cannot read each other's memory: %s", error)
    everywhere = torch.tensor(int(found is not None), device=device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)
    return found if int(everywhere) else None

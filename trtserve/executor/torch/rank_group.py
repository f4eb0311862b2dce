"""The place of a model's process among the ranks of its engine."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class RankGroup:
    """This process's place among the ranks, and what it exchanges with them; here nothing, for a model in one process.

    Ranks are numbered as in the checkpoint, tensor parallelism fastest: rank = stage · tp_size + tp_rank.
    """

    tp_size: int = 1
    tp_rank: int = 0
    stages: int = 1
    stage: int = 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.stage == self.stages - 1

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of the tensor-parallel ranks' `part`, which may be overwritten."""
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the tensor-parallel ranks' `part` [r, n] side by side: [r, tp_size · n]."""
        return part

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the same tensor-parallel rank of the next stage."""
        raise AssertionError(hidden)

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill `hidden` with the states that the previous stage sends, and return it."""
        raise AssertionError(hidden)


ALONE = RankGroup()

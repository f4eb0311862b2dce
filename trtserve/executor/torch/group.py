"""The ranks that share a model: tensor parallel within a pipeline stage, hidden states from stage to stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Tensor = Any


class RankGroup(Protocol):
    """This process's place among the ranks, and what it exchanges with them.

    Ranks are numbered as in the checkpoint, tensor parallelism fastest: rank = stage · tp_size + tp_rank.
    """

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of a stage."""

    @property
    def tp_rank(self) -> int:
        """This process's number among them."""

    @property
    def stages(self) -> int:
        """Pipeline stages."""

    @property
    def stage(self) -> int:
        """This process's stage."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of the tensor-parallel ranks' `part`, which may be overwritten."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """Return the tensor-parallel ranks' `part` [r, n] side by side: [r, tp_size · n]."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the same tensor-parallel rank of the next stage."""
        ...

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill `hidden` with the states that the previous stage sends, and return it."""
        ...


@dataclass(frozen=True)
class Alone:
    """The group of a model in one process: nothing is exchanged."""

    tp_size: int = 1
    tp_rank: int = 0
    stages: int = 1
    stage: int = 0

    def all_reduce(self, part: Tensor) -> Tensor:
        """Return `part`."""
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        """Return `part`."""
        return part

    def send(self, hidden: Tensor) -> None:
        """Never called: there is no next stage."""
        raise AssertionError(hidden)

    def receive(self, hidden: Tensor) -> Tensor:
        """Never called: there is no previous stage."""
        raise AssertionError(hidden)


ALONE = Alone()

"""All ranks of an engine on PyTorch as threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.model import StepInputs
from trtserve.executor.torch.model import TorchModel, load_model
from trtserve.executor.torch.rank_group import RankGroup

_SOON = 60.0


@dataclass
class ThreadGroup(RankGroup):
    """A rank among threads; `parts` and `barrier` belong to its stage, `inbox` and `outbox` are those of its column."""

    parts: list[Any] = field(default_factory=list)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))
    inbox: Queue[Any] = field(default_factory=Queue)
    outbox: Queue[Any] = field(default_factory=Queue)

    def all_reduce(self, part: Any) -> Any:
        parts = self._exchange(part)
        return sum(parts[1:], start=parts[0])

    def all_gather(self, part: Any) -> Any:
        import torch

        return torch.cat(self._exchange(part), -1)

    def _exchange(self, part: Any) -> list[Any]:
        self.parts[self.tp_rank] = part
        self.barrier.wait(_SOON)
        parts = list(self.parts)
        self.barrier.wait(_SOON)
        return parts

    def send(self, hidden: Any) -> None:
        self.outbox.put(hidden)

    def receive(self, hidden: Any) -> Any:
        hidden.copy_(self.inbox.get(timeout=_SOON))
        return hidden


class ThreadRanks:
    """The ranks of the engine in `engine`, which take the same steps; the logits are those of the last stage."""

    def __init__(self, engine: Path, tp_size: int, stages: int) -> None:
        import torch

        if torch.cuda.is_available():  # loads the solver, which fails when two threads are the first to need it
            torch.linalg.solve_triangular(torch.ones(1, 1, 1).cuda(), torch.ones(1, 1, 1).cuda(), upper=False)
        links = [[Queue[Any]() for _ in range(tp_size)] for _ in range(stages + 1)]
        groups = []
        for stage in range(stages):
            parts, barrier = [None] * tp_size, threading.Barrier(tp_size)
            groups += [
                ThreadGroup(tp_size, rank, stages, stage, parts, barrier, links[stage][rank], links[stage + 1][rank])
                for rank in range(tp_size)
            ]
        self.ranks: list[TorchModel] = [load_model(engine, None, group) for group in groups]
        self.tokens_per_block = self.ranks[0].tokens_per_block

    def allocate(self, num_blocks: int) -> None:
        for rank in self.ranks:
            rank.allocate(num_blocks)

    @property
    def bytes_per_state(self) -> int:
        sizes: list[int] = [rank.bytes_per_state for rank in self.ranks]
        return max(sizes)

    def allocate_states(self, num_states: int) -> None:
        for rank in self.ranks:
            rank.allocate_states(num_states)

    def forward(self, step: StepInputs) -> npt.NDArray[np.float32]:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            results = list(pool.map(lambda rank: rank.forward(step), self.ranks))
        logits: npt.NDArray[np.float32] = results[-1]
        return logits

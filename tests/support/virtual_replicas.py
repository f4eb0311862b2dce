"""Engines in virtual time: the model of each holds every step until its time has come."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Any

from tests.support.fake_model import VOCAB, FakeModel
from trtserve.executor.api import Executor
from trtserve.executor.engine.model import StepInputs
from trtserve.pipeline.fleet.simulation import ReplicaSpeed

SPEED = ReplicaSpeed(step=0.04, sequence=0.002, prompt_token=0.0002, request=0.0, slots=8)
PROMPT, ANSWER = 60, 16


class HeldModel(FakeModel):
    """Reports each step, and computes it when it may."""

    def __init__(self) -> None:
        super().__init__(tokens_per_block=32)
        self.begun: queue.SimpleQueue[tuple[list[int], int]] = queue.SimpleQueue()
        """Of each step the requests whose prompts it has, and its number of sequences."""
        self.may_end = threading.Semaphore(0)

    def forward(self, step: StepInputs) -> Any:
        firsts = step.subsequence_begins[:-1][step.past_lens == 0]
        new = [int(step.token_ids[at]) * VOCAB + int(step.token_ids[at + 1]) for at in firsts]
        self.begun.put((new, len(step.past_lens)))
        assert self.may_end.acquire(timeout=60)
        return super().forward(step)


@dataclass
class VirtualReplica:
    """An engine whose steps end at moments of virtual time."""

    executor: Executor
    model: HeldModel
    left: dict[int, int] = field(default_factory=dict)
    """Request → tokens that it still gets."""
    step: list[int] = field(default_factory=list)
    """Requests in the step that runs."""
    busy: bool = False

    def begin(self, now: float) -> float:
        """Wait until the engine has begun a step, and return when it ends."""
        new, count = self.model.begun.get(timeout=60)
        self.step = [request for request, tokens in self.left.items() if tokens < ANSWER] + new
        assert len(self.step) == count
        self.busy = True
        return now + SPEED.step + SPEED.sequence * count + SPEED.prompt_token * PROMPT * len(new)

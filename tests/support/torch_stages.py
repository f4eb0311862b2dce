"""The stages of a pipeline on PyTorch in this process, one after the other: a `ChoosingModel`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.model import Chosen, Draws, PendingStep, StepInputs
from trtserve.executor.torch.model import load_model
from trtserve.executor.torch.rank_group import RankGroup
from trtserve.executor.torch.staged_model import StagedModel


@dataclass
class _Arrival:
    sent: list[Any]
    number: int

    def on_device(self) -> Any:
        return self.sent[self.number]

    def on_host(self) -> Any:
        return self.sent[self.number].cpu()


@dataclass
class _Stage(RankGroup):
    """A stage whose neighbours share its queues; `sent` is what the last one sent to the first."""

    before: deque[Any] = field(default_factory=deque)
    after: deque[Any] = field(default_factory=deque)
    sent: list[Any] = field(default_factory=list)
    expected: int = 0

    @property
    def rank(self) -> int:
        return self.stage

    def send(self, hidden: Any) -> None:
        self.after.append(hidden.clone())

    def receive(self, hidden: Any) -> Any:
        return hidden.copy_(self.before.popleft())

    def send_to_first(self, tensor: Any) -> None:
        self.sent.append(tensor.clone())

    def expect(self, shape: tuple[int, ...], dtype: Any) -> _Arrival:
        del shape, dtype
        self.expected += 1
        return _Arrival(self.sent, self.expected - 1)


@dataclass
class _Step:
    of_stages: list[PendingStep]

    def choose(self, allowed: npt.NDArray[np.uint32]) -> None:
        for step in self.of_stages:
            step.choose(allowed)

    def result(self) -> Chosen:
        chosen, *_ = [step.result() for step in self.of_stages]
        return chosen


class LocalStages:
    """The engine in `engine`, which has `count` stages."""

    step_costs: Sequence[float] = ()
    plain_costs: Sequence[float] = ()
    brief_tokens = 0

    def __init__(self, engine: Path, count: int) -> None:
        links, sent = [deque[Any]() for _ in range(count + 1)], list[Any]()
        groups = [_Stage(1, 0, count, number, links[number], links[number + 1], sent) for number in range(count)]
        self.stages: list[Any] = [load_model(engine, None, group, model_class=StagedModel) for group in groups]
        self.parts: list[int] = []
        """How many tokens each part of each step had, as the first stage computed it."""
        first: Any = self.stages[0]
        self.vocab_size: int = first.vocab_size
        self.hidden_size: int = first.hidden_size
        self.max_position: int = first.max_position
        self.tokens_per_block: int = first.tokens_per_block
        self.max_prompt_table: int = first.max_prompt_table
        self.lora = first.lora
        self.kv_memory_fraction: float = first.kv_memory_fraction
        self.bytes_per_block = max(stage.bytes_per_block for stage in self.stages)
        self.bytes_per_state = max(stage.bytes_per_state for stage in self.stages)
        run = first._run

        def counted(words: Any, step: StepInputs) -> Any:
            self.parts.append(len(step.token_ids))
            return run(words, step)

        first._run = counted

    def free_memory(self) -> int:
        return min(int(stage.free_memory()) for stage in self.stages)

    def allocate(self, num_blocks: int) -> None:
        for stage in self.stages:
            stage.allocate(num_blocks)

    def allocate_states(self, num_states: int) -> None:
        for stage in self.stages:
            stage.allocate_states(num_states)

    def warm_up(self) -> None:
        for stage in self.stages:
            stage.warm_up()

    def copy_block(self, source: int, target: int) -> None:
        for stage in self.stages:
            stage.copy_block(source, target)

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for stage in self.stages:
            stage.copy_states(sources, targets)

    def start(self, draws: Draws, step: StepInputs) -> PendingStep:
        arrays = self.stages[0].arrays(draws)
        return _Step([stage.launch(arrays, step) for stage in self.stages])

    def forward(self, step: StepInputs) -> npt.NDArray[np.float32]:
        return self.start(Draws(), step).result().logits

"""Steps in which the model chooses the tokens itself: what it must know of the sequences, and what it returns.

The executor can prepare and send the next step while such a step is computed, because the model keeps the chosen tokens
as the next step's inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.model import ModelRunner, StepInputs
from trtserve.executor.engine.sampling import SamplingRow


@dataclass(slots=True)
class Draws:
    """The rows of a step whose tokens the model chooses, as `sampling.choose_tokens` would. All lists are parallel."""

    numbers: list[int] = field(default_factory=list)
    """The rows, ascending."""
    rows: list[SamplingRow] = field(default_factory=list)
    """How to choose. The rows' `generated` and processors may lack the token of the step before."""
    slots: list[int] = field(default_factory=list)
    """Which sequence it is: a number that it keeps from one step to the next."""
    counts: list[int] = field(default_factory=list)
    """How many tokens the sequence has generated before this one."""
    begins: list[bool] = field(default_factory=list)
    """True in a sequence's first step in its slot: then the row's processor has seen all of its tokens."""
    normalize_log_probs: bool = True


class Chosen(NamedTuple):
    """The results of a step."""

    tokens: list[int]
    """Of the draws; UNDEFINED or EXHAUSTED as in `sampling.Choice`."""
    log_probs: npt.NDArray[np.float32]
    """f32[draws, 2], (log_prob, full_log_prob) as in `sampling.Choice` of rows that want them."""
    logits: npt.NDArray[np.float32]
    """f32[r, V] of the rows that are not among the draws, in their order; like the result of `ModelRunner.forward`."""


class PendingStep(Protocol):
    """A step that the model computes."""

    def result(self) -> Chosen:
        """Wait until the step is computed. Called once for each step, in the order of the steps."""
        ...


@runtime_checkable
class ChoosingModel(ModelRunner, Protocol):
    """A model that can choose tokens."""

    def start(self, draws: Draws, step: StepInputs) -> PendingStep:
        """Send a step and return without waiting for it.

        Steps, and calls of `copy_block` between them, take effect in the order of the calls. At most two steps are
        pending. An id of -1 - n in `token_ids` is the token that the model chose for row n of the step before.
        """
        ...

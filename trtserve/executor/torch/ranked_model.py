"""A model whose layers or heads are spread over ranks: rank 0 calls it, the others follow each call."""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from trtserve.executor.engine.limits import EngineOptions
from trtserve.executor.engine.lora import AdapterBatch, AdapterStack
from trtserve.executor.engine.model import Chosen, Draws, Follower, ModelRunner, PendingStep, StepInputs
from trtserve.executor.loaders import read_engine_config
from trtserve.executor.torch import model
from trtserve.executor.torch.choosing_model import ChoosingTorchModel
from trtserve.executor.torch.draw_words import DrawArrays
from trtserve.executor.torch.ranks import Ranks, join
from trtserve.executor.torch.staged_model import StagedModel

logger = logging.getLogger(__name__)

_Owner: TypeAlias = "npt.NDArray[np.int64]"
# A step without its adapters, which token has which, and their weights if the other ranks do not have them.
_Described: TypeAlias = "tuple[StepInputs, _Owner | None, AdapterStack | None]"

# mpirun reports the rank that ends first, which should be the one that is the reason for the end.
_LAST_WORDS = 1.0


class RankedModel:
    """The part of a model that belongs to one rank, with the calls of `ModelRunner` for the whole of it on rank 0.

    Rank 0 sends the name and arguments of each call to the others: less than a kilobyte for a step with a few
    sequences. All ranks then compute the same call together.
    """

    step_costs: Sequence[float] = ()
    plain_costs: Sequence[float] = ()
    brief_tokens = 0

    def __init__(self, model: ChoosingTorchModel, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self._stack: AdapterStack | None = None
        self.vocab_size = model.vocab_size
        self.hidden_size = model.hidden_size
        self.max_position = model.max_position
        self.tokens_per_block = model.tokens_per_block
        self.max_prompt_table = model.max_prompt_table
        self.lora = model.lora
        self.kv_memory_fraction = model.kv_memory_fraction
        # The stages may have different numbers of layers, and the GPUs different amounts of free memory.
        self.bytes_per_state = -ranks.smallest(-model.bytes_per_state)
        self.bytes_per_block = -ranks.smallest(-model.bytes_per_block)
        self._free_memory = ranks.smallest(model.free_memory())


class LeadingModel(RankedModel):
    """Rank 0, which the executor calls; implements `ChoosingModel`."""

    def free_memory(self) -> int:
        """Return the free memory of the rank that has least."""
        return self._free_memory

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache of every rank."""
        self._tell("allocate", num_blocks)
        self._model.allocate(num_blocks)

    def allocate_states(self, num_states: int) -> None:
        """Allocate the states of every rank."""
        self._tell("allocate_states", num_states)
        self._model.allocate_states(num_states)

    def warm_up(self) -> None:
        """Warm up every rank."""
        self._tell("warm_up")
        self._model.warm_up()

    def start(self, draws: Draws, step: StepInputs) -> PendingStep:
        """Send a step on all ranks."""
        arrays = self._model.arrays(draws)
        with _all_or_none():
            self._tell("launch", arrays, *self._described(step))
            return _RankedStep(self, self._model.launch(arrays, step))

    def choose(self, pending: PendingStep, allowed: npt.NDArray[np.uint32]) -> None:
        """Let all ranks choose the tokens of the step that was started last; see `PendingStep.choose`."""
        with _all_or_none():
            self._tell("choose", allowed)
            pending.choose(allowed)

    def forward(self, step: StepInputs) -> npt.NDArray[Any]:
        """Compute a step on all ranks."""
        return self.start(Draws(), step).result().logits

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of the cache on every rank."""
        with _all_or_none():
            self._tell("copy_block", source, target)
            self._model.copy_block(source, target)

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy states on every rank."""
        with _all_or_none():
            self._tell("copy_states", sources, targets)
            self._model.copy_states(sources, targets)

    def _described(self, step: StepInputs) -> _Described:
        adapters = step.adapters
        if adapters is None:
            return step, None, None
        # The weights of adapters stay with the other ranks until a step has others.
        stack = None if adapters.stack is self._stack else adapters.stack
        self._stack = adapters.stack
        return replace(step, adapters=None), adapters.owner, stack

    def _tell(self, name: str, *arguments: Any) -> None:
        if self._ranks.device.type == "cuda":  # the current device belongs to a thread, and the executor has its own
            torch.cuda.set_device(self._ranks.device)
        self._ranks.tell(pickle.dumps((name, arguments), protocol=pickle.HIGHEST_PROTOCOL))


@dataclass(frozen=True, slots=True)
class _RankedStep:
    """A step of all ranks: `PendingStep`."""

    model: LeadingModel
    own: PendingStep

    def choose(self, allowed: npt.NDArray[np.uint32]) -> None:
        self.model.choose(self.own, allowed)

    def result(self) -> Chosen:
        return self.own.result()


@contextmanager
def _all_or_none() -> Iterator[None]:
    """End this process when a call fails: the others have computed it, or wait for this rank in the middle of it."""
    try:
        yield
    except Exception:
        logger.critical("Rank 0 failed in a call that the other ranks take part in, and ends.", exc_info=True)
        logging.shutdown()
        os._exit(1)


class FollowingModel(RankedModel):
    """Any other rank; implements `Follower`."""

    def __init__(self, model: ChoosingTorchModel, ranks: Ranks) -> None:
        super().__init__(model, ranks)
        self._pending: deque[PendingStep] = deque(maxlen=2)

    def follow(self) -> None:
        """Compute what rank 0 computes, until rank 0 ends."""
        while (message := self._ranks.hear()) is not None:
            name, arguments = pickle.loads(message)  # the connection to rank 0 is authenticated
            if name == "launch":
                self._launch(*arguments)
            elif name == "choose":
                self._pending[-1].choose(*arguments)
            else:
                getattr(self._model, name)(*arguments)
        time.sleep(_LAST_WORDS)

    def _launch(self, arrays: DrawArrays, *described: Any) -> None:
        # Rank 0 never has more than two steps on their way either.
        if len(self._pending) == self._pending.maxlen:
            self._pending[0].result()
        self._pending.append(self._model.launch(arrays, self._restored(*described)))

    def _restored(self, step: StepInputs, owner: _Owner | None, stack: AdapterStack | None) -> StepInputs:
        self._stack = stack or self._stack
        if owner is not None and self._stack is not None:
            return replace(step, adapters=AdapterBatch(self._stack, owner))
        return step


def load_model(engine: Path, options: EngineOptions) -> ModelRunner | Follower:
    """Load the engine; `loaders.MODELS` names this module. With ranks, return when all of them are there."""
    content = read_engine_config(engine)
    tp_size, stages = content.mapping.tp_size, content.mapping.pp_size
    windows = options.kv_cache.windows
    if tp_size * stages == 1:
        gpu = options.device_ids[0] if options.device_ids else None
        return model.load_model(engine, windows, model_class=ChoosingTorchModel, gpu=gpu)
    ranks = join(tp_size, stages, content.trtserve.device, options.device_ids)
    kind = ChoosingTorchModel if stages == 1 else StagedModel
    part = cast("ChoosingTorchModel", model.load_model(engine, windows, ranks, model_class=kind))
    return LeadingModel(part, ranks) if ranks.rank == 0 else FollowingModel(part, ranks)

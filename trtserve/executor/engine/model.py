"""The interface between the executor and a model: paged attention over a KV cache that the executor manages.

`ModelRunner` is all that the scheduler, the sampler and the KV block manager know of a model, so that another framework
can implement it. The model owns the memory of the KV cache; the executor decides which block belongs to which sequence.
All calls after construction come from one thread, the one that runs the engine's loop.

A `ChoosingModel` chooses tokens itself and keeps them as the next step's inputs, so that the executor can prepare and
send the next step while a step is computed.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.lora import AdapterBatch
from trtserve.executor.engine.sampling import SamplingRow
from trtserve.executor.engine.shapes import LoraShape

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What a model computes in one step: t new tokens of s sequences, one sequence after another.

    Prompts and generations may be mixed. The arrays are only valid until the step has been sent.
    """

    token_ids: Int64s
    """i64[t]. An id of vocab_size + n is row n of `prompt_table`; for one of -1 - n see `ChoosingModel.start`."""
    positions: Int64s  # i64[t], the position of each token in its sequence
    past_lens: Int32s  # i32[s], the number of each sequence's tokens that are already in the cache
    subsequence_begins: Int32s  # i32[s + 1]. Sequence i owns tokens subsequence_begins[i] … subsequence_begins[i + 1].
    block_indices: Int32s
    """i32[b], the b cache blocks of all sequences, one sequence after another. Sequences may share full blocks.

    Block n of a sequence holds its tokens n * tokens_per_block … (n + 1) * tokens_per_block.
    """
    block_indices_begins: Int32s
    """i32[s + 1]. Sequence i owns block_indices[block_indices_begins[i] … block_indices_begins[i + 1]]."""
    max_context_len: int  # the largest number of past plus new tokens of a sequence
    rows: Int32s  # i32[r], the numbers (0 … t - 1) of the tokens whose logits are needed, in the order of the result
    prompt_table: Logits | None = None  # f32[n, hidden_size], the embeddings of ids from vocab_size on
    adapters: AdapterBatch | None = None  # the LoRA adapters of the tokens, or None if no token has one
    long_sequences: npt.NDArray[np.bool_] | None = None
    """boolean[s], the sequences that LongRoPE rotates with its long factors; None means none."""
    states: Int32s | None = None
    """i32[s], where a model with states keeps those of the sequences; None: where nothing is read again."""


def single_sequence(
    token_ids: SequenceOf[int], blocks: SequenceOf[int], *, past: int = 0, rows: SequenceOf[int] | None = None
) -> StepInputs:
    """Return a step of one sequence with `past` tokens in the cache and logits of `rows`, by default of all tokens."""
    count = len(token_ids)
    return StepInputs(
        token_ids=np.array(token_ids, np.int64),
        positions=np.arange(past, past + count),
        past_lens=np.array([past], np.int32),
        subsequence_begins=np.array([0, count], np.int32),
        block_indices=np.array(blocks, np.int32),
        block_indices_begins=np.array([0, len(blocks)], np.int32),
        max_context_len=past + count,
        rows=np.array(range(count) if rows is None else rows, np.int32),
    )


class FatalModelError(RuntimeError):
    """A model cannot compute any more, whatever it is asked for: its executor stops, and with it the process.

    Any other exception of a step ends the requests of that step only. A MemoryError says that they needed too much.
    """


@runtime_checkable
class Follower(Protocol):
    """A rank that computes its part of what another process, rank 0, asks its own `ModelRunner`."""

    def follow(self) -> None:
        """Compute until rank 0 ends."""


class ModelRunner(Protocol):
    """A model with paged attention; `loaders.MODELS` lists the implementations.

    Every method that computes may raise FatalModelError.
    """

    vocab_size: int  # width of the logits; larger token ids refer to rows of a prompt table
    hidden_size: int  # width of a prompt table's rows
    max_position: int  # position ids must be below this
    tokens_per_block: int  # tokens in a block of the KV cache
    bytes_per_block: int  # memory of a block: keys and values of all layers
    kv_memory_fraction: float  # largest part of `free_memory` for the KV cache, unless the configuration says otherwise
    max_prompt_table: int  # rows of the largest prompt table, or 0 if the engine was built without prompt tables
    lora: LoraShape | None
    """Modules and ranks that LoRA adapters may have, or None if the engine was built without LoRA."""

    @property
    def step_costs(self) -> SequenceOf[float]:
        """Times of steps of 1, 2, … tokens that decode, some of them drafts, known once the model is warm.

        Empty: no drafts are made for it.
        """

    def free_memory(self) -> int:
        """Return the free bytes of the memory that will hold the KV cache; with ranks, of the one with least."""

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache, blocks 0 … num_blocks - 1. Called once, before all other methods."""

    def warm_up(self) -> None:
        """Do one-time work (compile, pack weights, tune), so that the first step is as fast as any other."""

    def forward(self, step: StepInputs) -> Logits:
        """Write the keys and values of the step's tokens to the cache and return logits f32[r, vocab_size] of its rows.

        The array may be a view that is valid until the next call; the executor writes to it.
        """

    def copy_block(self, source: int, target: int) -> None:
        """Copy keys and values of block `source` to block `target`, in every layer."""


@runtime_checkable
class StatefulModel(ModelRunner, Protocol):
    """A model that may have layers with a state of fixed size for each sequence, in rows of a table.

    A step starts from an empty state where a sequence has no past tokens, and otherwise from the one in its row; it
    writes the state after the step's tokens to the row.
    """

    bytes_per_state: int  # memory of a row: the states of all layers. 0: the model has none.

    def allocate_states(self, num_states: int) -> None:
        """Allocate rows 0 … num_states - 1. Called once, after `allocate`."""

    def copy_states(self, sources: SequenceOf[int], targets: SequenceOf[int]) -> None:
        """Copy each of the rows `sources` to the row of `targets` at its place; all are read before any is written."""


@dataclass(slots=True)
class Draws:
    """The rows of a step whose tokens the model chooses, as `sampling.choose_tokens` would. All lists are parallel."""

    numbers: list[int] = field(default_factory=list)  # the rows, ascending
    rows: list[SamplingRow] = field(default_factory=list)
    """How to choose. `generated` and the processors may not yet include the token of the step before."""
    slots: list[int] = field(default_factory=list)
    """Which sequence it is: a number that it keeps from one step to the next."""
    counts: list[int] = field(default_factory=list)  # how many tokens the sequence has generated before this one
    begins: list[bool] = field(default_factory=list)
    """True in a sequence's first step in its slot: then the row's processor has seen all of its tokens."""
    normalize_log_probs: bool = True


class Chosen(NamedTuple):
    """The results of a step."""

    tokens: list[int]  # of the draws; UNDEFINED or EXHAUSTED as in `sampling.Choice`
    log_probs: npt.NDArray[np.float32]
    """f32[draws, 2], (log_prob, full_log_prob) as in `sampling.Choice` of rows that want them."""
    logits: npt.NDArray[np.float32]
    """f32[r, V] of the rows that are not among the draws, in their order; like the result of `ModelRunner.forward`."""


class PendingStep(Protocol):
    """A step that the model computes."""

    def choose(self, allowed: npt.NDArray[np.uint32]) -> None:
        """Let the tokens of a step with guides be chosen, while it may still be computed.

        `allowed` u32[guides, ⌈V / 32⌉] has what `Guide.allowed` gives, for the draws with a guide in their order. It is
        called once for each step with guides, before the next step is started.
        """

    def result(self) -> Chosen:
        """Wait until the step is computed. Called once for each step, in the order of the steps."""


@runtime_checkable
class ChoosingModel(ModelRunner, Protocol):
    """A model that can choose tokens."""

    @property
    def plain_costs(self) -> SequenceOf[float]:
        """Times of steps of 1, 2, … tokens without drafts, as many as `step_costs`."""

    @property
    def brief_tokens(self) -> int:
        """The most tokens of a step with prompts that takes little longer than one that only decodes; 0: not known."""

    def start(self, draws: Draws, step: StepInputs) -> PendingStep:
        """Send a step and return without waiting for it.

        Steps, and calls of `copy_block` between them, take effect in the order of the calls. At most two steps are
        pending. If a row has a guide, no token of the step is chosen before `PendingStep.choose`.
        An id of -1 - n in `token_ids` is the token that the model chose for row n of the step before.
        """

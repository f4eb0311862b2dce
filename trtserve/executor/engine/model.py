"""The interface between the executor and a model: paged attention over a KV cache that the executor manages.

`Model` is all that the scheduler, the sampler and the KV block manager know of a model, so that another framework can
implement it. The model owns the memory of the KV cache; the executor decides which block belongs to which sequence.
All calls after construction come from one thread, the executor's worker.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.lora import AdapterBatch
from trtserve.executor.engine.lora_modules import LoraShape

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class FatalModelError(RuntimeError):
    """A model cannot compute any more, whatever it is asked for: its executor stops, and with it the process.

    Any other exception of a step ends the requests of that step only. A MemoryError says that they needed too much.
    """


@runtime_checkable
class Follower(Protocol):
    """A rank that computes its part of what another process, rank 0, asks its own `Model`."""

    def follow(self) -> None:
        """Compute until rank 0 ends."""


class Model(Protocol):
    """A model with paged attention. `paged_model.PagedModel` implements it with OpenVINO;
    `loaders.MODELS` lists all.

    Every method that computes may raise FatalModelError.
    """

    vocab_size: int
    """Width of the logits; larger token ids refer to rows of a prompt table."""
    hidden_size: int
    """Width of a prompt table's rows."""
    max_position: int
    """Position ids must be below this."""
    tokens_per_block: int
    """Tokens in a block of the KV cache."""
    bytes_per_block: int
    """Memory of a block: keys and values of all layers."""
    kv_memory_fraction: float
    """Largest part of `free_memory` for the KV cache, unless the configuration says otherwise."""
    max_prompt_table: int
    """Rows of the largest prompt table, or 0 if the engine was built without prompt tables."""
    lora: LoraShape | None
    """Modules and ranks that LoRA adapters may have, or None if the engine was built without LoRA."""

    @property
    def step_costs(self) -> SequenceOf[float]:
        """Times of decode steps of 1, 2, … tokens, known once the model is warm; empty: no drafts are made for it."""
        ...

    def free_memory(self) -> int:
        """Return the free bytes of the memory that will hold the KV cache; with ranks, of the one with least."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache, blocks 0 … num_blocks - 1. Called once, before all other methods."""

    def warm_up(self) -> None:
        """Do one-time work (compile, pack weights, tune), so that the first step is as fast as any other."""

    def forward(
        self,
        *,
        token_ids: Int64s,
        positions: Int64s,
        past_lens: Int32s,
        subsequence_begins: Int32s,
        block_indices: Int32s,
        block_indices_begins: Int32s,
        max_context_len: int,
        rows: Int32s | Int64s,
        prompt_table: Logits | None = None,
        adapters: AdapterBatch | None = None,
        long_sequences: npt.NDArray[np.bool_] | None = None,
    ) -> npt.NDArray[Any]:
        """Write the keys and values of the new tokens to the cache and return the logits of some of the tokens.

        A step has t new tokens of s sequences, one sequence after another; prompts and generations may be mixed. The
        arrays are only valid during the call.

        Args:
            token_ids: i64[t]. An id of vocab_size + n is row n of `prompt_table`.
            positions: i64[t], the position of each token in its sequence.
            past_lens: i32[s], the number of each sequence's tokens that are already in the cache.
            subsequence_begins: i32[s + 1]. Sequence i owns tokens subsequence_begins[i] … subsequence_begins[i + 1].
            block_indices: i32[b], the cache blocks of all sequences, one sequence after another. Block n of a sequence
                holds its tokens n * tokens_per_block … (n + 1) * tokens_per_block. Sequences may share full blocks.
            block_indices_begins: i32[s + 1]. Sequence i owns block_indices[block_indices_begins[i] …
                block_indices_begins[i + 1]].
            max_context_len: the largest number of past plus new tokens of a sequence.
            rows: [r], the numbers (0 … t - 1) of the tokens whose logits are needed, in the order of the result.
            prompt_table: f32[n, hidden_size], the embeddings of ids from vocab_size on.
            adapters: the LoRA adapters of the tokens, or None if no token has one.
            long_sequences: boolean[s], the sequences that LongRoPE rotates with its long factors; None means none.

        Returns:
            Logits f32[r, vocab_size]. The array may be a view that is valid until the next call; the executor writes
            to it.

        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy keys and values of block `source` to block `target`, in every layer."""

"""What the executor asks of a model: logits of chosen tokens, given where the sequences' KV blocks are."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trtserve.executor.lora import AdapterBatch
from trtserve.executor.lora_modules import LoraShape

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class Model(Protocol):
    """A paged-attention model; `PagedModel` is the real one.

    `max_prompt_table` counts the rows of prompt tables that the engine was built for, 0 for none; `lora` says what
    its adapters may look like, None for none.
    """

    vocab_size: int
    max_position: int
    tokens_per_block: int
    bytes_per_block: int
    hidden_size: int
    max_prompt_table: int
    lora: LoraShape | None

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache."""

    def warm_up(self) -> None:
        """Do, once there is a cache, what the first step would have to do before it could be fast."""

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
        """Logits f32[r, vocab_size] of the token rows `rows`; a view that is valid until the next call.

        Token ids from vocab_size on are rows of `prompt_table` f32[n, hidden_size]; `adapters` are the LoRA adapters
        of the tokens, None when no token has one. `long_sequences` boolean[s] tells which sequences LongRoPE rotates
        as long ones, from their first token on.
        """
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy keys and values of block `source` to block `target`, in every layer."""

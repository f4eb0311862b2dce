"""What the executor asks of a model: logits of chosen tokens, given where the sequences' KV blocks are."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class Model(Protocol):
    """A paged-attention model; `PagedModel` is the real one."""

    vocab_size: int
    max_position: int
    tokens_per_block: int
    bytes_per_block: int

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache."""

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
    ) -> npt.NDArray[Any]:
        """Logits f32[r, vocab_size] of the token rows `rows`; a view that is valid until the next call."""
        ...

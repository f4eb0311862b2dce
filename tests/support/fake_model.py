"""A paged model made of NumPy whose next token depends on every token before it, read back from the KV blocks."""

from __future__ import annotations

import threading
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

VOCAB = 97


def fake_logits(tokens: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Logits f32[97] after `tokens`."""
    seed = zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes())
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


def greedy_continuation(prompt: list[int], count: int) -> list[int]:
    """The next `count` tokens of `prompt`, one sequence at a time and without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake_logits(np.array(tokens)).argmax()))
    return tokens[len(prompt) :]


class FakeModel:
    """Keeps token ids in place of keys and values; a wrong block table gives wrong tokens.

    `gate` holds each step back until it is set; `failures` steps raise before they work; `steps` holds the tokens of
    each step.
    """

    def __init__(self, *, tokens_per_block: int = 4, bytes_per_block: int = 64) -> None:
        self.vocab_size = VOCAB
        self.max_position = 1 << 20
        self.tokens_per_block = tokens_per_block
        self.bytes_per_block = bytes_per_block
        self.cache = np.zeros(0, dtype=np.int64)
        self.blocks = 0
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0
        self.steps: list[int] = []

    def allocate(self, num_blocks: int) -> None:
        self.blocks = num_blocks
        self.cache = np.full(num_blocks * self.tokens_per_block, -1, dtype=np.int64)

    def forward(
        self,
        *,
        token_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        past_lens: npt.NDArray[np.int32],
        subsequence_begins: npt.NDArray[np.int32],
        block_indices: npt.NDArray[np.int32],
        block_indices_begins: npt.NDArray[np.int32],
        max_context_len: int,
        rows: npt.NDArray[Any],
    ) -> npt.NDArray[np.float32]:
        if not self.gate.wait(timeout=30):
            raise TimeoutError("the test never opened the gate")
        if self.failures:
            self.failures -= 1
            raise ValueError("broken step")
        self.steps.append(len(token_ids))
        contexts: dict[int, npt.NDArray[np.int64]] = {}
        longest = 0
        assert len(set(block_indices.tolist())) == len(block_indices)
        for number, past in enumerate(past_lens.tolist()):
            first, last = subsequence_begins[number : number + 2].tolist()
            blocks = block_indices[block_indices_begins[number] : block_indices_begins[number + 1]]
            places = (blocks[:, None] * self.tokens_per_block + np.arange(self.tokens_per_block)).reshape(-1)
            end = past + last - first
            assert positions[first:last].tolist() == list(range(past, end))
            assert (len(blocks) - 1) * self.tokens_per_block < end <= len(places)
            self.cache[places[past:end]] = token_ids[first:last]
            longest = max(longest, end)
            for token in range(first, last):
                contexts[token] = self.cache[places[: past + token - first + 1]]
        assert longest == max_context_len
        assert len(token_ids) == subsequence_begins[-1]
        return np.stack([fake_logits(contexts[int(row)]) for row in rows]) if len(rows) else np.zeros((0, VOCAB), "f4")

"""Which blocks of the KV cache belong to whom: a pool of counted blocks, and one row of blocks per running sequence."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BlockPool:
    """Blocks 0 … count − 1, each free or referenced; a block returns to the pool with its last reference.

    The block freed last is taken first, so that the memory touched stays small.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._references = np.zeros(count, dtype=np.int32)

    @property
    def free(self) -> int:
        """Blocks that nobody references."""
        return len(self._free)

    def acquire(self) -> int:
        """Take a free block with one reference; IndexError when there is none."""
        block = self._free.pop()
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block that is in use."""
        if self._references[block] < 1:
            raise ValueError(f"block {block} is free")
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop one reference."""
        if self._references[block] < 1:
            raise ValueError(f"block {block} is free")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.append(block)


class KvCache:
    """Block rows of the running sequences, with room set aside for each to its end (guaranteed_no_evict).

    A running sequence owns a slot: a row of `table` i32[sequences, blocks per sequence], of which `counts`
    i32[sequences] entries are in use.
    """

    def __init__(self, *, blocks: int, tokens_per_block: int, max_sequences: int, max_tokens: int) -> None:
        self.pool = BlockPool(blocks)
        self.tokens_per_block = tokens_per_block
        self.table = np.zeros((max_sequences, self.blocks_for(max_tokens)), dtype=np.int32)
        self.counts = np.zeros(max_sequences, dtype=np.int32)
        self._slots = list(range(max_sequences - 1, -1, -1))
        self._reserved = np.zeros(max_sequences, dtype=np.int64)
        self._outstanding = 0
        self.allocated_total = 0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill."""
        return -(-tokens // self.tokens_per_block)

    @property
    def available(self) -> int:
        """Free blocks that are not set aside for a running sequence."""
        return self.pool.free - self._outstanding

    def start(self, tokens: int) -> int | None:
        """Set blocks aside for a sequence of `tokens` tokens at its end; its slot, or None when they do not fit."""
        need = self.blocks_for(tokens)
        if need > self.available or not self._slots:
            return None
        slot = self._slots.pop()
        self._reserved[slot] = need
        self._outstanding += need
        return slot

    def extend(self, slot: int, tokens: int) -> int:
        """Give `slot` the blocks that hold its first `tokens` tokens; returns how many tokens its blocks now hold."""
        count = int(self.counts[slot])
        missing = self.blocks_for(tokens) - count
        for index in range(count, count + missing):
            self.table[slot, index] = self.pool.acquire()
        if missing > 0:
            self.counts[slot] = count + missing
            self._reserved[slot] -= missing
            self._outstanding -= missing
            self.allocated_total += missing
        return int(self.counts[slot]) * self.tokens_per_block

    def finish(self, slot: int) -> None:
        """Take back the blocks of `slot` and what was set aside for it."""
        for block in self.table[slot, : self.counts[slot]].tolist():
            self.pool.release(block)
        self.counts[slot] = 0
        self._outstanding -= int(self._reserved[slot])
        self._reserved[slot] = 0
        self._slots.append(slot)

    def indices(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """The blocks of `slots`, one slot after another, i32[b]."""
        counts = self.counts[slots]
        rows = self.table[slots, : int(counts.max())]
        chosen: npt.NDArray[np.int32] = rows[np.arange(rows.shape[1]) < counts[:, None]]
        return chosen

"""Which blocks of the KV cache belong to whom: one row of blocks per beam of each running sequence.

Reference: executor-api sections 3.2 and 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trtserve.executor.block_pool import BlockPool
from trtserve.executor.requests import KvCacheRetentionConfig
from trtserve.executor.reuse import DEFAULT_RETENTION, NO_MATCH, BlockTree, Match, Node, encode, retention_of

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CacheKey:
    """What makes the blocks of a sequence reusable: `tokens` i64[n] of its context when it starts, and all besides.

    `extra_ids` tell prompt-table rows apart, one per prompt token. Nothing is matched unless `reusable`, nothing is
    kept afterwards unless `stored`.
    """

    tokens: Int64s
    extra_ids: tuple[int, ...] | None = None
    adapter: int | None = None
    salt: int | None = None
    retention: KvCacheRetentionConfig | None = None
    reusable: bool = True
    stored: bool = True


@dataclass(slots=True)
class BlockUse:
    """Blocks in one sequence's life: allocated (`new` ones held nothing known), reused, and missed in its context."""

    total: int = 0
    new: int = 0
    reused: int = 0
    missed: int = 0


class Allocation(NamedTuple):
    """Rows of the block table, one per beam, and how many tokens of the context are in the cache already."""

    slots: tuple[int, ...]
    reused_tokens: int


@dataclass(slots=True)
class _Story:
    """What a running sequence has made known: its first `blocks` blocks, of which `last` is the node."""

    key: CacheKey
    last: Node
    blocks: int


class KvCache:
    """Block rows of the running sequences, with room set aside for what the scheduler has promised them.

    A beam of a running sequence owns a slot: a row of `table` i32[rows, blocks per sequence], of which `counts`
    i32[rows] entries are in use. With `reuse`, blocks stay known by their contents when nobody references them, and
    count as free.
    """

    def __init__(
        self,
        *,
        blocks: int,
        tokens_per_block: int,
        max_rows: int,
        max_tokens: int,
        copy_block: Callable[[int, int], None],
        reuse: bool = False,
        partial_reuse: bool = True,
        copy_on_partial_reuse: bool = True,
    ) -> None:
        self.reuse = reuse
        self.tokens_per_block = tokens_per_block
        self.known = BlockTree(tokens_per_block)
        self.pool = BlockPool(blocks, self.known if reuse else None)
        self.table = np.zeros((max_rows, self.blocks_for(max_tokens)), dtype=np.int32)
        self.counts = np.zeros(max_rows, dtype=np.int32)
        self.allocated_total = self.reused_total = self.missed_total = 0
        self._copy_block = copy_block
        self._partial = partial_reuse
        self._copy_on_partial = copy_on_partial_reuse
        self._slots = list(range(max_rows - 1, -1, -1))
        self._reserved = [0] * max_rows
        self._outstanding = 0
        self._uses = [BlockUse()] * max_rows
        self._stories: list[_Story | None] = [None] * max_rows

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill."""
        return -(-tokens // self.tokens_per_block)

    @property
    def available(self) -> int:
        """Free blocks that are not set aside for a running sequence."""
        return self.pool.free - self._outstanding

    @property
    def new_total(self) -> int:
        """Blocks allocated so far that held nothing known."""
        return self.allocated_total - self.pool.evicted

    def start(self, key: CacheKey, *, reserve: int, width: int, use: BlockUse) -> Allocation | None:
        """Give a sequence of `width` beams its rows, what is known of its context, and room for `reserve` tokens.

        None when they do not fit. Beams share the blocks that the context fills: floor(P / bs) blocks, and
        (ceil(reserve / bs) − shared) × width beside them.
        """
        if width > len(self._slots):
            return None
        total = self.blocks_for(reserve)
        shared = len(key.tokens) // self.tokens_per_block if width > 1 else total
        need = shared + (total - shared) * width
        root, match = self._match(key, width) if self.reuse else (None, NO_MATCH)
        if match.nodes:
            need -= sum(self.pool.references(node.block) > 0 for node in match.nodes)
        if need > self.available:
            return None
        slots = tuple([self._slots.pop() for _ in range(width)])
        for slot in slots:
            self._uses[slot] = use
            self._set_aside(slot, total - shared)
        self._set_aside(slots[0], shared)
        return Allocation(slots, 0 if root is None else self._adopt(slots[0], key, root, match))

    def _set_aside(self, slot: int, blocks: int) -> None:
        self._reserved[slot] += blocks
        self._outstanding += blocks

    def _match(self, key: CacheKey, width: int) -> tuple[Node, Match]:
        """What is known of a context: all but its last token, of several beams whole blocks before the last."""
        root = self.known.root(key.adapter, key.salt)
        if not key.reusable:
            return root, NO_MATCH
        limit = len(key.tokens) - 1
        if width > 1:
            limit -= limit % self.tokens_per_block
        match = self.known.match(root, encode(key.tokens[:limit], key.extra_ids, 0), partial=self._partial)
        if match.partial is None or self._copy_on_partial or match.partial.free_leaf:
            return root, match
        return root, Match(match.nodes)

    def _adopt(self, slot: int, key: CacheKey, root: Node, match: Match) -> int:
        """Begin the row of `slot` with what is known; the number of tokens in it."""
        for index, node in enumerate(match.nodes):
            self.pool.share(node.block)
            self.table[slot, index] = node.block
            self._retain(node, key, index)
        whole = len(match.nodes)
        self.counts[slot] = whole
        self._set_aside(slot, -whole)
        if match.partial is not None:
            self._adopt_partial(slot, match.partial)
        if key.stored:
            self._stories[slot] = _Story(key, match.nodes[-1] if match.nodes else root, whole)
        reused = int(self.counts[slot])
        self._count_context(self._uses[slot], reused, self.blocks_for(len(key.tokens)) - reused)
        return whole * self.tokens_per_block + match.partial_tokens

    def _retain(self, node: Node, key: CacheKey, index: int) -> None:
        """A sequence that asks for another retention of a block that it reuses gets it."""
        retention = retention_of(key.retention, index * self.tokens_per_block, generated=False)
        if retention != DEFAULT_RETENTION:
            node.retention = retention

    def _adopt_partial(self, slot: int, node: Node) -> None:
        """Append a block of one's own that begins as the one of `node`: that itself when nobody needs it."""
        if node.free_leaf:
            self._append(slot, self.pool.take_over(node))
            return
        self.pool.share(node.block)  # so that it is not the one given up for its copy
        self._append_copy(slot, node.block)
        self.pool.release(node.block)

    def _count_context(self, use: BlockUse, reused: int, missed: int) -> None:
        use.reused += reused
        use.missed += missed
        self.reused_total += reused
        self.missed_total += missed

    def next_missing(self, key: CacheKey) -> bytes | None:
        """What identifies the first whole block of a context that is not known yet; None when all are."""
        if not (self.reuse and key.reusable):
            return None
        root = self.known.root(key.adapter, key.salt)
        content = encode(key.tokens[:-1], key.extra_ids, 0)
        end = (len(self.known.match(root, content, partial=False).nodes) + 1) * self.known.block_bytes
        return root.key + content[:end] if end <= len(content) else None

    def reserve(self, slots: tuple[int, ...], tokens: int) -> bool:
        """Set aside what `slots` lack to hold `tokens` tokens each; False, and nothing, when it does not fit."""
        need = self.blocks_for(tokens)
        lacking = [max(0, need - int(self.counts[slot]) - self._reserved[slot]) for slot in slots]
        if sum(lacking) > self.available:
            return False
        for slot, blocks in zip(slots, lacking, strict=True):
            self._set_aside(slot, blocks)
        return True

    def extend(self, slot: int, tokens: int) -> int:
        """Give `slot` the blocks that hold its first `tokens` tokens; returns how many tokens its blocks now hold."""
        count = int(self.counts[slot])
        missing = self.blocks_for(tokens) - count
        if missing > 0:
            self.table[slot, count : count + missing] = self._acquire(slot, missing)
            count += missing
            self.counts[slot] = count
            self._set_aside(slot, -missing)
        return count * self.tokens_per_block

    def _acquire(self, slot: int, count: int = 1) -> list[int]:
        """Blocks that nobody uses, counted for the sequence of `slot`."""
        pool, use = self.pool, self._uses[slot]
        evicted = pool.evicted
        blocks = [pool.acquire() for _ in range(count)]
        use.total += count
        use.new += count - (pool.evicted - evicted)
        self.allocated_total += count
        return blocks

    def _append(self, slot: int, block: int) -> None:
        """Put a block of one's own at the end of a row; it was set aside."""
        self.table[slot, self.counts[slot]] = block
        self.counts[slot] += 1
        self._set_aside(slot, -1)

    def _append_copy(self, slot: int, source: int) -> None:
        (block,) = self._acquire(slot)
        self._copy_block(source, block)
        self._append(slot, block)

    def fork(self, slots: tuple[int, ...], tokens: int) -> None:
        """Let all beams go on from the `tokens` tokens of the first: whole blocks are shared, the last is copied."""
        first, *others = slots
        whole = tokens // self.tokens_per_block
        blocks = self.table[first, : self.counts[first]].tolist()
        for slot in others:
            for block in blocks[:whole]:
                self.pool.share(block)
            self.table[slot, :whole] = blocks[:whole]
            self.counts[slot] = whole
            for block in blocks[whole:]:
                self._append_copy(slot, block)

    def reorder(self, slots: tuple[int, ...], parents: Sequence[int], tokens: int) -> None:
        """Let beam i go on from beam parents[i]; all have `tokens` tokens in equally many blocks.

        One of the beams with the same parent keeps its partial block, the others copy it into those that beams
        without successors give back.
        """
        if all(parent == beam for beam, parent in enumerate(parents)):
            return
        whole = tokens // self.tokens_per_block
        rows = [self.table[slot, : self.counts[slot]].tolist() for slot in slots]
        self._share_whole(slots, parents, [row[:whole] for row in rows])
        tails = [row[whole:] for row in rows]
        heirs = {parent: beam for beam, parent in reversed(list(enumerate(parents)))}
        heirs |= {parent: parent for beam, parent in enumerate(parents) if beam == parent}
        for beam, tail in enumerate(tails):
            for block in tail if beam not in heirs else ():
                self.pool.release(block)
        for beam, parent in enumerate(parents):
            if beam != parent:
                self._replace_tail(slots[beam], whole, tails[parent], keep=heirs[parent] == beam)

    def _share_whole(self, slots: tuple[int, ...], parents: Sequence[int], rows: list[list[int]]) -> None:
        """Replace the beams' whole blocks by those of their parents; all are shared before any is released."""
        dropped: list[int] = []
        for beam, parent in enumerate(parents):
            for index, (old, new) in enumerate(zip(rows[beam], rows[parent], strict=True)):
                if old != new:
                    self.pool.share(new)
                    self.table[slots[beam], index] = new
                    dropped.append(old)
        for block in dropped:
            self.pool.release(block)

    def _replace_tail(self, slot: int, whole: int, tail: list[int], *, keep: bool) -> None:
        """End the row of `slot` with the blocks `tail` themselves, or with copies of them."""
        for index, block in enumerate(tail, start=whole):
            mine = block
            if not keep:
                (mine,) = self._acquire(slot)
                self._copy_block(block, mine)
            self.table[slot, index] = mine

    def filled(self, slot: int, tokens: Int64s | list[int]) -> None:
        """Make known the whole blocks of `slot`, which holds `tokens` (from the first of its sequence on)."""
        story = self._stories[slot]
        if story is None or len(tokens) // self.tokens_per_block <= story.blocks:
            return
        size = self.tokens_per_block
        for index in range(story.blocks, len(tokens) // size):
            block = int(self.table[slot, index])
            node = self._insert(story, tokens[index * size : (index + 1) * size], block)
            if node.block != block:  # somebody else has computed the same
                self.pool.share(node.block)
                self.table[slot, index] = node.block
                self.pool.release(block)
            story.last, story.blocks = node, index + 1

    def _insert(self, story: _Story, tokens: Int64s | list[int], block: int) -> Node:
        """Make the next block of a story known."""
        key, first = story.key, story.blocks * self.tokens_per_block
        retention = retention_of(key.retention, first, generated=first >= len(key.tokens))
        return self.known.insert(story.last, encode(tokens, key.extra_ids, first), block, retention)

    def finish(self, slots: tuple[int, ...], tokens: Int64s | list[int]) -> None:
        """Take back the rows `slots` and what was set aside for them; what holds `tokens` may be used again.

        `tokens` are those whose keys and values are in the cache, from the first on; none when they are not to be
        trusted.
        """
        self._keep(slots[0], tokens)
        for slot in slots:
            for block in reversed(self.table[slot, : self.counts[slot]].tolist()):
                self.pool.release(block)
            self.counts[slot] = 0
            self._set_aside(slot, -self._reserved[slot])
            self._slots.append(slot)

    def _keep(self, slot: int, tokens: Int64s | list[int]) -> None:
        """Make known what `slot` holds, its last block too."""
        self.filled(slot, tokens)
        story, self._stories[slot] = self._stories[slot], None
        if story is None or not self._partial:
            return
        rest = tokens[story.blocks * self.tokens_per_block :]
        if len(rest):
            self._insert(story, rest, int(self.table[slot, story.blocks]))

    def indices(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.int32]:
        """The blocks of `slots`, one slot after another, i32[b]."""
        if len(slots) == 1:
            return self.table[slots[0], : self.counts[slots[0]]]
        counts = self.counts[slots]
        rows = self.table[slots, : int(counts.max())]
        chosen: npt.NDArray[np.int32] = rows[np.arange(rows.shape[1]) < counts[:, None]]
        return chosen

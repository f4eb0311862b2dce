"""Assign the blocks of the KV cache: one row of blocks per beam of each running sequence, with reuse of contents."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trtserve.executor.engine.blocks import (
    DEFAULT_RETENTION,
    NO_MATCH,
    BlockPool,
    BlockTree,
    Match,
    Node,
    RetentionRules,
    encode,
    retention_of,
)
from trtserve.executor.engine.requests import BlockUse

CopyStates = Callable[[Sequence[int], Sequence[int]], None]


class StateRows:
    """The states of sequences in models with a state.

    Rows 0 … rows - 1 belong to the rows of the block table; `kept` more are for reuse. A state cannot be cut back to
    fewer tokens, as keys and values can. So a sequence reuses a known beginning only up to a block whose state was
    kept: the last one before a prompt's end, and where a chunk of a prompt ended. Rows for this are few; the one that
    has not been used for longest is given up.
    """

    def __init__(self, *, rows: int, kept: int, copy: CopyStates, tree: BlockTree) -> None:
        self._copy = copy
        self._tree = tree
        self._spare = list(range(rows, rows + kept))
        self._kept: OrderedDict[int, Node] = OrderedDict()  # by row, the one used longest ago first

    def usable(self, match: Match) -> Match:
        """Return the whole blocks of a known beginning up to the last one whose state was kept."""
        count = next((n for n in range(len(match.nodes), 0, -1) if match.nodes[n - 1].state is not None), 0)
        return Match(match.nodes[:count]) if count else NO_MATCH

    def restore(self, node: Node, slot: int) -> None:
        """Continue in row `slot` from the state after the block of `node`."""
        assert node.state is not None  # `usable` has found it
        self._kept.move_to_end(node.state)
        self._copy([node.state], [slot])

    def keep(self, slot: int, node: Node) -> None:
        """Keep the state in row `slot`, which is the one after the block of `node`."""
        if node.state is not None:
            self._kept.move_to_end(node.state)
        elif self._spare or self._kept:
            node.state = self._spare.pop() if self._spare else self._give_up()
            self._kept[node.state] = node
            self._copy([slot], [node.state])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let each of the rows `targets` continue from the row of `sources` at its place."""
        self._copy(sources, targets)

    def _give_up(self) -> int:
        """Return the row of a block that is no longer known, or else the one that was used longest ago."""
        forgotten = (row for row, node in self._kept.items() if self._tree.known(node.block) is not node)
        row = next(forgotten, next(iter(self._kept)))
        self._kept.pop(row).state = None
        return row


Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CacheKey:
    """What identifies the reusable blocks of a sequence."""

    tokens: Int64s  # i64[n], the context when the sequence starts
    extra_ids: tuple[int, ...] | None = None  # one per prompt token; tells apart the rows of different prompt tables
    adapter: int | None = None
    salt: int | None = None
    retention: RetentionRules | None = None
    reusable: bool = True  # whether blocks of other sequences may be reused
    stored: bool = True  # whether its own blocks are kept for others


class Allocation(NamedTuple):
    """Blocks of a sequence that starts."""

    slots: tuple[int, ...]  # rows of the block table, one per beam
    reused_tokens: int  # tokens of the context that are in the cache already


@dataclass(slots=True)
class _StoredPrefix:
    """The beginning of a running sequence that is in the tree."""

    key: CacheKey
    last: Node  # the node of its last block
    blocks: int


class KvCache:
    """The block table of the running sequences, with reservations for what the scheduler has promised them.

    Each beam of a running sequence owns a slot: a row of `table` i32[rows, blocks per sequence], of which `counts`
    i32[rows] entries are in use. With `reuse`, blocks without references stay in `tree` by their contents and count as
    free.
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
        copy_states: CopyStates | None = None,
        kept_states: int = 0,
    ) -> None:
        """Manage `blocks` blocks; `copy_states` of a model with states, of which `kept_states` are for reuse."""
        self.reuse = reuse
        self.tokens_per_block = tokens_per_block
        self.tree = BlockTree(tokens_per_block)
        self.pool = BlockPool(blocks, self.tree if reuse else None)
        self.table = np.zeros((max_rows, self.blocks_for(max_tokens)), dtype=np.int32)
        self.counts = np.zeros(max_rows, dtype=np.int32)
        self.allocated_total = self.reused_total = self.missed_total = 0
        self._copy_block = copy_block
        self._states = None
        if copy_states is not None:
            self._states = StateRows(rows=max_rows, kept=kept_states, copy=copy_states, tree=self.tree)
        self._partial = partial_reuse and self._states is None
        self._copy_on_partial = copy_on_partial_reuse
        self._slots = list(range(max_rows - 1, -1, -1))
        self._reserved = [0] * max_rows
        self._outstanding = 0
        self._uses = [BlockUse()] * max_rows
        self._prefixes: list[_StoredPrefix | None] = [None] * max_rows
        self._unfinished: deque[list[Node]] = deque()  # of each step on its way: what became known since it began

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens need."""
        return -(-tokens // self.tokens_per_block)

    @property
    def available(self) -> int:
        """Free blocks that are not reserved for a running sequence."""
        return self.pool.free - self._outstanding

    @property
    def new_total(self) -> int:
        """Blocks allocated so far without evicting reusable contents."""
        return self.allocated_total - self.pool.evicted

    def start(self, key: CacheKey, *, reserve: int, width: int, use: BlockUse) -> Allocation | None:
        """Give a sequence of `width` beams its slots, reuse known blocks, and reserve blocks for `reserve` tokens.

        Returns None when they do not fit. Beams share the blocks that the context fills: floor(context / block size)
        blocks, plus (ceil(reserve / block size) - shared) blocks per beam.
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
            self._adjust_reservation(slot, total - shared)
        self._adjust_reservation(slots[0], shared)
        return Allocation(slots, 0 if root is None else self._attach_match(slots[0], key, root, match))

    def _adjust_reservation(self, slot: int, blocks: int) -> None:
        self._reserved[slot] += blocks
        self._outstanding += blocks

    def _match(self, key: CacheKey, width: int) -> tuple[Node, Match]:
        """Match all but the last token of a context; with several beams only full blocks before the last."""
        root = self.tree.root(key.adapter, key.salt)
        if not key.reusable:
            return root, NO_MATCH
        limit = len(key.tokens) - 1
        if width > 1:
            limit -= limit % self.tokens_per_block
        match = self.tree.match(root, encode(key.tokens[:limit], key.extra_ids, 0), partial=self._partial)
        if self._states is not None:
            return root, self._states.usable(match)
        if match.partial is None or self._copy_on_partial or match.partial.free_leaf:
            return root, match
        return root, Match(match.nodes)

    def _attach_match(self, slot: int, key: CacheKey, root: Node, match: Match) -> int:
        """Begin the row of `slot` with the matched blocks; return the number of tokens in them."""
        for index, node in enumerate(match.nodes):
            self.pool.share(node.block)
            self.table[slot, index] = node.block
            # A sequence that asks for another retention of a block that it reuses changes it.
            retention = retention_of(key.retention, index * self.tokens_per_block, generated=False)
            if retention != DEFAULT_RETENTION:
                node.retention = retention
        full = len(match.nodes)
        self.counts[slot] = full
        self._adjust_reservation(slot, -full)
        if match.partial is not None:
            self._attach_partial(slot, match.partial)
        if self._states is not None and match.nodes:
            self._states.restore(match.nodes[-1], slot)
        if key.stored:
            self._prefixes[slot] = _StoredPrefix(key, match.nodes[-1] if match.nodes else root, full)
        reused = int(self.counts[slot])
        missed = self.blocks_for(len(key.tokens)) - reused
        use = self._uses[slot]
        use.reused += reused
        use.missed += missed
        self.reused_total += reused
        self.missed_total += missed
        return full * self.tokens_per_block + match.partial_tokens

    def _attach_partial(self, slot: int, node: Node) -> None:
        """Append an unshared block that begins like that of `node`: the block itself if it is unused, else a copy."""
        if node.free_leaf:
            self._append(slot, self.pool.take_over(node))
            return
        self.pool.share(node.block)  # so that it is not evicted for its own copy
        self._append_copy(slot, node.block)
        self.pool.release(node.block)

    def next_missing(self, key: CacheKey) -> bytes | None:
        """Return what identifies the first full block of a context that is not in the tree, or None if all are."""
        if not (self.reuse and key.reusable):
            return None
        root = self.tree.root(key.adapter, key.salt)
        content = encode(key.tokens[:-1], key.extra_ids, 0)
        end = (len(self.tree.match(root, content, partial=False).nodes) + 1) * self.tree.block_bytes
        return root.key + content[:end] if end <= len(content) else None

    def reserve(self, slots: tuple[int, ...], tokens: int) -> bool:
        """Reserve blocks for `tokens` tokens in each of `slots`. If they do not fit, reserve none and return False."""
        need = self.blocks_for(tokens)
        lacking = [max(0, need - int(self.counts[slot]) - self._reserved[slot]) for slot in slots]
        if sum(lacking) > self.available:
            return False
        for slot, blocks in zip(slots, lacking, strict=True):
            self._adjust_reservation(slot, blocks)
        return True

    def extend(self, slot: int, tokens: int) -> int:
        """Give `slot` the blocks for its first `tokens` tokens; return how many tokens its blocks can hold."""
        count = int(self.counts[slot])
        missing = self.blocks_for(tokens) - count
        if missing > 0:
            self.table[slot, count : count + missing] = self._acquire(slot, missing)
            count += missing
            self.counts[slot] = count
            self._adjust_reservation(slot, -missing)
        return count * self.tokens_per_block

    def _acquire(self, slot: int, count: int = 1) -> list[int]:
        """Take free blocks and count them for the sequence of `slot`."""
        pool, use = self.pool, self._uses[slot]
        evicted = pool.evicted
        blocks = [pool.acquire() for _ in range(count)]
        use.total += count
        use.new += count - (pool.evicted - evicted)
        self.allocated_total += count
        return blocks

    def _append(self, slot: int, block: int) -> None:
        """Append an unshared block to a row; it was reserved before."""
        self.table[slot, self.counts[slot]] = block
        self.counts[slot] += 1
        self._adjust_reservation(slot, -1)

    def _append_copy(self, slot: int, source: int) -> None:
        (block,) = self._acquire(slot)
        self._copy_block(source, block)
        self._append(slot, block)

    def fork(self, slots: tuple[int, ...], tokens: int) -> None:
        """Continue all beams from the `tokens` tokens of the first: full blocks are shared, the last one is copied."""
        first, *others = slots
        if self._states is not None:
            self._states.move([first] * len(others), others)
        full = tokens // self.tokens_per_block
        blocks = self.table[first, : self.counts[first]].tolist()
        for slot in others:
            for block in blocks[:full]:
                self.pool.share(block)
            self.table[slot, :full] = blocks[:full]
            self.counts[slot] = full
            for block in blocks[full:]:
                self._append_copy(slot, block)

    def reorder(self, slots: tuple[int, ...], parents: Sequence[int], tokens: int) -> None:
        """Continue beam i from beam parents[i]; all have `tokens` tokens in equally many blocks.

        Of beams with one parent, one keeps the partial block and the others get copies, in blocks freed by beams that
        end.
        """
        if all(parent == beam for beam, parent in enumerate(parents)):
            return
        if self._states is not None:
            self._states.move([slots[parent] for parent in parents], slots)
        full = tokens // self.tokens_per_block
        rows = [self.table[slot, : self.counts[slot]].tolist() for slot in slots]
        self._share_full_blocks(slots, parents, [row[:full] for row in rows])
        tails = [row[full:] for row in rows]
        heirs = {parent: beam for beam, parent in reversed(list(enumerate(parents)))}
        heirs |= {parent: parent for beam, parent in enumerate(parents) if beam == parent}
        for beam, tail in enumerate(tails):
            for block in tail if beam not in heirs else ():
                self.pool.release(block)
        for beam, parent in enumerate(parents):
            if beam != parent:
                self._replace_tail(slots[beam], full, tails[parent], keep=heirs[parent] == beam)

    def _share_full_blocks(self, slots: tuple[int, ...], parents: Sequence[int], rows: list[list[int]]) -> None:
        """Replace full blocks by those of the parents; all are shared before any is released."""
        dropped: list[int] = []
        for beam, parent in enumerate(parents):
            for index, (old, new) in enumerate(zip(rows[beam], rows[parent], strict=True)):
                if old != new:
                    self.pool.share(new)
                    self.table[slots[beam], index] = new
                    dropped.append(old)
        for block in dropped:
            self.pool.release(block)

    def _replace_tail(self, slot: int, full: int, tail: list[int], *, keep: bool) -> None:
        """End the row of `slot` with the blocks `tail` (`keep`), or with copies of them."""
        for index, block in enumerate(tail, start=full):
            mine = block
            if not keep:
                (mine,) = self._acquire(slot)
                self._copy_block(block, mine)
            self.table[slot, index] = mine

    def register_full_blocks(self, slot: int, tokens: Int64s | list[int]) -> None:
        """Store the full blocks of `slot`, which holds `tokens` (from the first of its sequence on), in the tree."""
        prefix = self._prefixes[slot]
        if prefix is None or len(tokens) // self.tokens_per_block <= prefix.blocks:
            return
        size = self.tokens_per_block
        for index in range(prefix.blocks, len(tokens) // size):
            block = int(self.table[slot, index])
            node = self._insert(prefix, tokens[index * size : (index + 1) * size], block)
            if node.block != block:  # another sequence has computed the same
                self.pool.share(node.block)
                self.table[slot, index] = node.block
                self.pool.release(block)
            prefix.last, prefix.blocks = node, index + 1

    @property
    def keeps_states(self) -> bool:
        """Whether reuse needs states that are kept where a chunk ends."""
        return self.reuse and self._states is not None

    def keep_state(self, slot: int, tokens: int) -> None:
        """Keep the state of `slot` after its first `tokens` tokens, if they fill blocks that others may reuse."""
        prefix = self._prefixes[slot]
        if self._states is not None and prefix is not None and 0 < tokens == prefix.blocks * self.tokens_per_block:
            self._states.keep(slot, prefix.last)

    def _insert(self, prefix: _StoredPrefix, tokens: Int64s | list[int], block: int) -> Node:
        """Store the next block of a prefix in the tree."""
        key, first = prefix.key, prefix.blocks * self.tokens_per_block
        retention = retention_of(key.retention, first, generated=first >= len(key.tokens))
        node = self.tree.insert(prefix.last, encode(tokens, key.extra_ids, first), block, retention)
        if self._unfinished and node.block == block:
            self._unfinished[-1].append(node)
        return node

    def step_started(self) -> None:
        """Note that a step is on its way: blocks that become known now may hold what only this step writes."""
        self._unfinished.append([])

    def step_finished(self) -> None:
        """Note that the oldest step on its way has succeeded."""
        if self._unfinished:
            self._unfinished.popleft()

    def steps_failed(self) -> None:
        """Forget the blocks that may lack what the steps on their way should have written."""
        while self._unfinished:
            for node in self._unfinished.popleft():
                self._discard(node)

    def distrust(self, slot: int) -> None:
        """Forget the blocks of `slot` and all that follow them: their keys and values have given no finite logits."""
        first = self.tree.known(int(self.table[slot, 0])) if self.reuse and self.counts[slot] else None
        if first is not None:
            self._discard(first)
        self._prefixes[slot] = None

    def _discard(self, node: Node) -> None:
        """Remove `node` and all that follow it from the tree; sequences that run on them store no more blocks."""
        removed = set(map(id, self.pool.discard(node)))
        if removed:
            self._prefixes = [
                None if prefix is not None and id(prefix.last) in removed else prefix for prefix in self._prefixes
            ]

    def free(self, slots: tuple[int, ...], tokens: Int64s | list[int]) -> None:
        """Free the rows `slots` and their reservations; blocks that hold `tokens` may be reused.

        `tokens` are those whose keys and values are in the cache, from the first on, or empty if they cannot be
        trusted.
        """
        self._store_rest(slots[0], tokens)
        for slot in slots:
            for block in reversed(self.table[slot, : self.counts[slot]].tolist()):
                self.pool.release(block)
            self.counts[slot] = 0
            self._adjust_reservation(slot, -self._reserved[slot])
            self._slots.append(slot)

    def _store_rest(self, slot: int, tokens: Int64s | list[int]) -> None:
        """Store the contents of `slot` in the tree, including its last, partial block."""
        self.register_full_blocks(slot, tokens)
        prefix, self._prefixes[slot] = self._prefixes[slot], None
        if prefix is None or not self._partial:
            return
        rest = tokens[prefix.blocks * self.tokens_per_block :]
        if len(rest):
            self._insert(prefix, rest, int(self.table[slot, prefix.blocks]))

    def indices(self, slots: npt.NDArray[np.intp], counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the first `counts` blocks of each of `slots`, one slot after another, i32[b]."""
        if len(slots) == 1:
            return self.table[slots[0], : counts[0]]
        rows = self.table[slots, : int(counts.max())]
        chosen: npt.NDArray[np.int32] = rows[np.arange(rows.shape[1]) < counts[:, None]]
        return chosen

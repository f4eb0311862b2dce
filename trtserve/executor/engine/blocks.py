"""The blocks of the KV cache: their contents as a tree, the order of eviction, and which are free or referenced."""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

DEFAULT_PRIORITY = 35  # priority of a block without a retention config, as in TensorRT-LLM

_TOKEN = np.dtype([("token", ">i4"), ("extra", ">u8")])
_UNIT = _TOKEN.itemsize
_SPARE_ENTRIES = 64
_E = TypeVar("_E", bound="tuple[float, int, int]")


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a free block is kept."""

    priority: int = DEFAULT_PRIORITY  # 0 … 100; the lowest is evicted first
    duration: float | None = None  # seconds after which the priority becomes the default one


DEFAULT_RETENTION = Retention()


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """How long the blocks of a request are kept."""

    ranges: tuple[tuple[int, int | None, Retention], ...] = ()
    """(first token, token after the last or None, retention) of ranges of the prompt."""
    generated: Retention = DEFAULT_RETENTION


@dataclass(slots=True, eq=False)
class Node:
    """A block with known contents; a root stands for no tokens."""

    block: int
    key: bytes  # its encoded tokens, which follow those of the parent
    parent: Node | None
    retention: Retention = DEFAULT_RETENTION
    children: dict[bytes, Node] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)
    """Sorted keys of the children; the longest common beginning is next to a key's place."""
    free: bool = False
    used: int = 0  # counter value when the block became free
    state: int | None = None  # the row with the state after its last token, in models with states

    @property
    def free_leaf(self) -> bool:
        """True when neither a sequence nor another known block needs it."""
        return self.free and not self.children


@dataclass(frozen=True, slots=True)
class Match:
    """The known beginning of a context."""

    nodes: list[Node]  # whole blocks
    partial: Node | None = None  # a block that begins with the next `partial_tokens` tokens
    partial_tokens: int = 0


NO_MATCH = Match([])


class BlockTree:
    """Blocks by their contents, including those without references.

    Who references a block also references the blocks before it. So only free blocks follow a free block, and every
    free block can be evicted, leaves first.
    """

    def __init__(self, tokens_per_block: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.free = 0
        self.block_bytes = tokens_per_block * _UNIT
        self._clock = clock
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._moment = 0
        # Outdated entries are skipped when they come up.
        self._evictable: list[tuple[int, int, int]] = []  # priority, moment, block
        self._expiring: list[tuple[float, int, int]] = []  # time, moment, block

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, adapter: int | None, salt: int | None) -> Node:
        """Return the node at which the contexts of an adapter and a salt begin; it is kept while it has children."""
        key = f"{adapter} {salt} ".encode()
        return self._roots.get(key) or Node(-1, key, None)

    def match(self, root: Node, content: bytes, *, partial: bool) -> Match:
        """Return the longest known beginning of `content`; with `partial`, also what matches of the next block."""
        nodes: list[Node] = []
        node, size = root, self.block_bytes
        for first in range(0, len(content), size):
            child = node.children.get(content[first : first + size]) if first + size <= len(content) else None
            if child is None:
                found, common = _closest(node, content[first : first + size]) if partial else (None, 0)
                return Match(nodes, found, common)
            nodes.append(child)
            node = child
        return Match(nodes)

    def insert(self, parent: Node, key: bytes, block: int, retention: Retention) -> Node:
        """Store the referenced `block` as `key` after `parent`, unless there is a node already; return the node."""
        if parent.parent is None:
            parent = self._roots.setdefault(parent.key, parent)
        known = parent.children.get(key)
        if known is not None:
            return known
        node = Node(block, key, parent, retention)
        parent.children[key] = node
        insort(parent.order, key)
        self._nodes[block] = node
        return node

    def claim(self, block: int) -> None:
        """Mark the free `block` as referenced."""
        self._nodes[block].free = False
        self.free -= 1

    def retire(self, block: int) -> None:
        """Mark `block` as free."""
        node = self._nodes[block]
        node.free = True
        self.free += 1
        self._moment += 1
        node.used = self._moment
        if node.retention.duration is not None:
            heapq.heappush(self._expiring, (self._clock() + node.retention.duration, node.used, block))
            self._expiring = self._compact(
                self._expiring, lambda entry: self._free_since(entry[1], entry[2]) is not None
            )
        self._add_evictable(node)

    def forget(self, node: Node) -> None:
        """Remove the free leaf `node`, whose block will be overwritten."""
        self.claim(node.block)
        del self._nodes[node.block]
        self._cut(node)

    def discard(self, node: Node) -> list[Node]:
        """Remove `node` and all that follow it, referenced or not, so that none is matched again; return them."""
        if self._nodes.get(node.block) is not node:  # it was removed before
            return []
        self._cut(node)
        removed, left = [], [node]
        while left:
            each = left.pop()
            left += each.children.values()
            each.children, each.order = {}, []
            if each.free:
                self.claim(each.block)
            del self._nodes[each.block]
            removed.append(each)
        return removed

    def _cut(self, node: Node) -> None:
        """Remove `node` from its parent's children."""
        parent = node.parent
        assert parent is not None  # roots have no block
        del parent.children[node.key]
        del parent.order[bisect_left(parent.order, node.key)]
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.key, None)
        self._add_evictable(parent)

    def known(self, block: int) -> Node | None:
        """Return the node of `block`, or None when its contents are not known."""
        return self._nodes.get(block)

    def evict(self) -> int:
        """Remove the least recently used free leaf of the lowest priority. Raises IndexError when none is free."""
        self._expire()
        while True:
            node = self._evictable_node(heapq.heappop(self._evictable))
            if node is not None:
                self.forget(node)
                return node.block

    def _add_evictable(self, node: Node) -> None:
        """Add `node` to the eviction order if it is free and a leaf."""
        if node.free_leaf:
            heapq.heappush(self._evictable, (node.retention.priority, node.used, node.block))
            self._evictable = self._compact(self._evictable, lambda entry: self._evictable_node(entry) is not None)

    def _compact(self, entries: list[_E], holds: Callable[[_E], bool]) -> list[_E]:
        """Return the heap `entries`, without outdated ones if there are too many of those."""
        if len(entries) <= 2 * len(self._nodes) + _SPARE_ENTRIES:
            return entries
        kept = [entry for entry in set(entries) if holds(entry)]
        heapq.heapify(kept)
        return kept

    def _free_since(self, moment: int, block: int) -> Node | None:
        """Return the node of `block` if it has been free since `moment`."""
        node = self._nodes.get(block)
        return node if node is not None and node.free and node.used == moment else None

    def _evictable_node(self, entry: tuple[int, int, int]) -> Node | None:
        """Return the node of an entry of `_evictable`, or None for an outdated entry."""
        priority, moment, block = entry
        node = self._free_since(moment, block)
        return node if node and not node.children and node.retention.priority == priority else None

    def _expire(self) -> None:
        """Give blocks whose retention is over the default priority."""
        while self._expiring and self._expiring[0][0] <= self._clock():
            _, moment, block = heapq.heappop(self._expiring)
            node = self._free_since(moment, block)
            if node is not None:
                node.retention = DEFAULT_RETENTION
                self._add_evictable(node)


def encode(tokens: npt.NDArray[np.int64] | Sequence[int], extra_ids: Sequence[int] | None, first: int) -> bytes:
    """Encode `tokens`, the first of which is token `first` of its context, each with its extra id (default 0)."""
    content = np.zeros(len(tokens), dtype=_TOKEN)
    content["token"] = tokens
    if extra_ids is not None:
        extra = extra_ids[first : first + len(tokens)]
        content["extra"][: len(extra)] = extra
    return content.tobytes()


def retention_of(rules: RetentionRules | None, first: int, *, generated: bool) -> Retention:
    """Return the retention of the block that begins with token `first` of its sequence."""
    if rules is None:
        return DEFAULT_RETENTION
    if generated:
        return rules.generated
    return next(
        (retention for start, end, retention in rules.ranges if start <= first and (end is None or first < end)),
        DEFAULT_RETENTION,
    )


def _closest(node: Node, wanted: bytes) -> tuple[Node | None, int]:
    """Return the child with the most leading tokens of `wanted` and their number, or None if none shares the first."""
    place = bisect_left(node.order, wanted)
    best, most = None, 0
    for key in node.order[max(place - 1, 0) : place + 1]:
        size = min(len(key), len(wanted))
        equal = np.frombuffer(key[:size], np.uint8) == np.frombuffer(wanted[:size], np.uint8)
        common = (size if equal.all() else int(equal.argmin())) // _UNIT
        if common > most:
            best, most = node.children[key], common
    return best, most


class BlockPool:
    """Blocks 0 … count - 1. A block becomes free with its last reference.

    The block freed last is taken first, so that little memory is touched. Blocks whose contents are in `tree` stay
    reusable and are taken only when there are no others.
    """

    def __init__(self, count: int, known: BlockTree | None = None) -> None:
        self.count = count
        self.evicted = 0
        self._tree = known
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def free(self) -> int:
        """Number of blocks without references."""
        return len(self._free) if self._tree is None else len(self._free) + self._tree.free

    def references(self, block: int) -> int:
        return self._references[block]

    def acquire(self) -> int:
        """Take a free block with one reference. Raises IndexError if there is none."""
        if self._free or self._tree is None:
            block = self._free.pop()
        else:
            block = self._tree.evict()
            self.evicted += 1
        self._references[block] = 1
        return block

    def take_over(self, node: Node) -> int:
        """Take the block of an unreferenced leaf of the tree, to write into it."""
        assert self._tree is not None  # the node comes from it
        self._tree.forget(node)
        self._references[node.block] = 1
        return node.block

    def discard(self, node: Node) -> list[Node]:
        """Remove `node` and all that follow it from the tree and return them; unreferenced blocks become empty ones."""
        assert self._tree is not None  # the node comes from it
        removed = self._tree.discard(node)
        self._free += [each.block for each in removed if self._references[each.block] == 0]
        return removed

    def share(self, block: int) -> None:
        """Add a reference to a block that is in use or in the tree."""
        if self._references[block] < 1:
            if self._tree is None or block not in self._tree:
                raise ValueError(f"block {block} is free")
            self._tree.claim(block)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop one reference."""
        if self._references[block] < 1:
            raise ValueError(f"block {block} is free")
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._tree is not None and block in self._tree:
                self._tree.retire(block)
            else:
                self._free.append(block)

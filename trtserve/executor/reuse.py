"""What the blocks of the KV cache hold: a tree of known blocks, and which of the free ones is given up first.

Reference: executor-api section 3.4.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from trtserve.executor.requests import KvCacheRetentionConfig

DEFAULT_PRIORITY = 35
"""Priority of a block for which nobody asked another."""

_TOKEN = np.dtype([("token", ">i4"), ("extra", ">u8")])
_UNIT = _TOKEN.itemsize
_SPARE_ENTRIES = 64
_E = TypeVar("_E", bound="tuple[float, int, int]")


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a free block is kept: lowest priority (0 … 100) goes first; after `duration` seconds it is 35."""

    priority: int = DEFAULT_PRIORITY
    duration: float | None = None


DEFAULT_RETENTION = Retention()


@dataclass(slots=True, eq=False)
class Node:
    """One known block: the `tokens` tokens in it follow those of its parent; a root stands for no tokens.

    `order` holds the children's keys sorted, where the longest common beginning is next to the place of a key.
    `used` is the moment (a count) at which the block became free last.
    """

    block: int
    key: bytes
    parent: Node | None
    retention: Retention = DEFAULT_RETENTION
    children: dict[bytes, Node] = field(default_factory=dict)
    order: list[bytes] = field(default_factory=list)
    free: bool = False
    used: int = 0

    @property
    def free_leaf(self) -> bool:
        """True when neither a sequence nor a known block needs it."""
        return self.free and not self.children


@dataclass(frozen=True, slots=True)
class Match:
    """The known beginning of a context: whole blocks, and the block whose first `partial_tokens` tokens come next."""

    nodes: list[Node]
    partial: Node | None = None
    partial_tokens: int = 0


NO_MATCH = Match([])


class BlockTree:
    """Known blocks by what is in them, and those among them that nobody references.

    Whoever references a block references the blocks before it too: so a free block has free blocks behind it only,
    and every free block can be given up, leaves first.
    """

    def __init__(self, tokens_per_block: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.free = 0
        self.block_bytes = tokens_per_block * _UNIT
        self._clock = clock
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._moment = 0
        # Entries that no longer hold are skipped when they come up.
        self._leaving: list[tuple[int, int, int]] = []  # priority, moment, block
        self._expiring: list[tuple[float, int, int]] = []  # time, moment, block

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, adapter: int | None, salt: int | None) -> Node:
        """Where the contexts of an adapter and a salt begin; it is kept while something is behind it."""
        key = f"{adapter} {salt} ".encode()
        return self._roots.get(key) or Node(-1, key, None)

    def match(self, root: Node, content: bytes, *, partial: bool) -> Match:
        """The longest known beginning of `content`; with `partial` also of the block that is not known whole."""
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
        """Make `block`, which is referenced, known with the tokens `key` behind `parent`; what is known stays."""
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
        """The known and free `block` is referenced from now on."""
        self._nodes[block].free = False
        self.free -= 1

    def retire(self, block: int) -> None:
        """Nobody references the known `block` any more."""
        node = self._nodes[block]
        node.free = True
        self.free += 1
        self._moment += 1
        node.used = self._moment
        if node.retention.duration is not None:
            heapq.heappush(self._expiring, (self._clock() + node.retention.duration, node.used, block))
            self._expiring = self._compact(self._expiring, lambda entry: self._freed(entry[1], entry[2]) is not None)
        self._offer(node)

    def forget(self, node: Node) -> None:
        """The free block of the leaf `node` will hold something else."""
        assert node.parent is not None  # roots have no block
        self.claim(node.block)
        del self._nodes[node.block]
        parent = node.parent
        del parent.children[node.key]
        del parent.order[bisect_left(parent.order, node.key)]
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.key, None)
        self._offer(parent)

    def evict(self) -> int:
        """Give up the free leaf of the lowest priority that was used least recently; IndexError when none is free."""
        self._expire()
        while True:
            node = self._offered(heapq.heappop(self._leaving))
            if node is not None:
                self.forget(node)
                return node.block

    def _offer(self, node: Node) -> None:
        """Let `node` be given up when it is free and a leaf."""
        if node.free_leaf:
            heapq.heappush(self._leaving, (node.retention.priority, node.used, node.block))
            self._leaving = self._compact(self._leaving, lambda entry: self._offered(entry) is not None)

    def _compact(self, entries: list[_E], holds: Callable[[_E], bool]) -> list[_E]:
        """The heap `entries`, without those that no longer hold when they have become too many."""
        if len(entries) <= 2 * len(self._nodes) + _SPARE_ENTRIES:
            return entries
        kept = [entry for entry in set(entries) if holds(entry)]
        heapq.heapify(kept)
        return kept

    def _freed(self, moment: int, block: int) -> Node | None:
        """The node of `block` when it has been free since `moment`."""
        node = self._nodes.get(block)
        return node if node is not None and node.free and node.used == moment else None

    def _offered(self, entry: tuple[int, int, int]) -> Node | None:
        """The node of an entry of `_leaving` that still holds."""
        priority, moment, block = entry
        node = self._freed(moment, block)
        return node if node and not node.children and node.retention.priority == priority else None

    def _expire(self) -> None:
        """Blocks whose duration is over have the default priority."""
        while self._expiring and self._expiring[0][0] <= self._clock():
            _, moment, block = heapq.heappop(self._expiring)
            node = self._freed(moment, block)
            if node is not None:
                node.retention = DEFAULT_RETENTION
                self._offer(node)


def encode(tokens: npt.NDArray[np.int64] | Sequence[int], extra_ids: Sequence[int] | None, first: int) -> bytes:
    """`tokens`, of which the first is token `first` of its context, each with its extra id (0 without), as bytes."""
    content = np.zeros(len(tokens), dtype=_TOKEN)
    content["token"] = tokens
    if extra_ids is not None:
        extra = extra_ids[first : first + len(tokens)]
        content["extra"][: len(extra)] = extra
    return content.tobytes()


def retention_of(config: KvCacheRetentionConfig | None, first: int, *, generated: bool) -> Retention:
    """Retention of the block whose first token is token `first` of its sequence."""
    if config is None:
        return DEFAULT_RETENTION
    if generated:
        duration = config.decode_duration_ms
        return Retention(config.decode_retention_priority, None if duration is None else duration.total_seconds())
    for item in config.token_range_retention_configs:
        if item.token_start <= first and (item.token_end is None or first < item.token_end):
            duration = item.duration_ms
            return Retention(item.priority, None if duration is None else duration.total_seconds())
    return DEFAULT_RETENTION


def _closest(node: Node, wanted: bytes) -> tuple[Node | None, int]:
    """The child that begins with the most tokens of `wanted`, and how many; None when none has the first."""
    place = bisect_left(node.order, wanted)
    best, most = None, 0
    for key in node.order[max(place - 1, 0) : place + 1]:
        common = _common_tokens(key, wanted)
        if common > most:
            best, most = node.children[key], common
    return best, most


def _common_tokens(first: bytes, second: bytes) -> int:
    size = min(len(first), len(second))
    equal = np.frombuffer(first[:size], np.uint8) == np.frombuffer(second[:size], np.uint8)
    return (size if equal.all() else int(equal.argmin())) // _UNIT

"""The blocks of the KV cache, each free or counted by who uses it."""

from __future__ import annotations

from trtserve.executor.reuse import BlockTree, Node


class BlockPool:
    """Blocks 0 … count − 1, each free or referenced; a block returns to the pool with its last reference.

    The block freed last is taken first, so that the memory touched stays small; blocks that `known` holds are taken
    when there are no others.
    """

    def __init__(self, count: int, known: BlockTree | None = None) -> None:
        self.count = count
        self.evicted = 0
        self._known = known
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def free(self) -> int:
        """Blocks that nobody references."""
        return len(self._free) if self._known is None else len(self._free) + self._known.free

    def references(self, block: int) -> int:
        """How often `block` is referenced."""
        return self._references[block]

    def acquire(self) -> int:
        """Take a free block with one reference; IndexError when there is none."""
        if self._free or self._known is None:
            block = self._free.pop()
        else:
            block = self._known.evict()
            self.evicted += 1
        self._references[block] = 1
        return block

    def take_over(self, node: Node) -> int:
        """Take the block of a known leaf that nobody references, to write into it."""
        assert self._known is not None  # it made the node
        self._known.forget(node)
        self._references[node.block] = 1
        return node.block

    def share(self, block: int) -> None:
        """Add a reference to a block that is in use or known."""
        if self._references[block] < 1:
            if self._known is None or block not in self._known:
                raise ValueError(f"block {block} is free")
            self._known.claim(block)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop one reference."""
        if self._references[block] < 1:
            raise ValueError(f"block {block} is free")
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._known is not None and block in self._known:
                self._known.retire(block)
            else:
                self._free.append(block)

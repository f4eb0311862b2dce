"""The blocks of the KV cache: free, or with a reference count."""

from __future__ import annotations

from trtserve.executor.engine.reuse import BlockTree, Node


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
        """Return the reference count of `block`."""
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

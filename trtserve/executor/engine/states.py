"""The states of sequences in models with a state: the row of each running sequence, and those kept for reuse.

A state cannot be cut back to fewer tokens, as keys and values can. So a sequence reuses a known beginning only up to a
block whose state was kept: the last one before a prompt's end, and where a chunk of a prompt ended. Rows for this are
few; the one that has not been used for longest is given up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from trtserve.executor.engine.blocks import NO_MATCH, BlockTree, Match, Node

CopyStates = Callable[[Sequence[int], Sequence[int]], None]


class StateRows:
    """Rows 0 … rows - 1 of the model's states belong to the rows of the block table; `kept` more are for reuse."""

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

"""The tree of known blocks: matching and eviction order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trtserve.executor.engine.blocks import (
    DEFAULT_RETENTION,
    BlockTree,
    Node,
    Retention,
    RetentionRules,
    encode,
    retention_of,
)


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _store(
    tree: BlockTree, root: Node, *blocks: Sequence[int], first: int, retention: Retention = DEFAULT_RETENTION
) -> None:
    """Store a chain of blocks numbered from `first`, then free them from the last one on."""
    node = root
    for number, tokens in enumerate(blocks, start=first):
        node = tree.insert(node, encode(tokens, None, 0), number, retention)
    for number in range(first + len(blocks) - 1, first - 1, -1):
        tree.retire(number)


def _matched(tree: BlockTree, tokens: Sequence[int], **root: int) -> tuple[list[int], int | None, int]:
    start = tree.root(root.get("lora"), root.get("salt"))
    match = tree.match(start, encode(tokens, None, 0), partial=True)
    return [node.block for node in match.nodes], match.partial.block if match.partial else None, match.partial_tokens


def test_whole_blocks_match_and_the_next_one_partially() -> None:
    tree = BlockTree(2)
    _store(tree, tree.root(None, None), [1, 2], [3, 4], [5], first=0)
    assert _matched(tree, [1, 2, 3, 4, 5, 6]) == ([0, 1], 2, 1)
    assert _matched(tree, [1, 2, 3]) == ([0], 1, 1)
    assert _matched(tree, [1, 2]) == ([0], None, 0)
    assert _matched(tree, [3, 4]) == ([], None, 0)


def test_partial_match_finds_the_longest_common_beginning() -> None:
    tree = BlockTree(4)
    root = tree.root(None, None)
    for number in range(50):
        _store(tree, root, [7, number // 10, number % 10, number], first=number)
    assert _matched(tree, [7, 3, 4, 999]) == ([], 34, 3)
    assert _matched(tree, [7, 99]) == ([], 49, 1)


def test_adapters_salts_and_extra_ids_separate_contexts() -> None:
    tree = BlockTree(2)
    _store(tree, tree.root(1, None), [1, 2], first=0)
    assert _matched(tree, [1, 2], lora=1)[0] == [0]
    assert _matched(tree, [1, 2]) == _matched(tree, [1, 2], lora=2) == _matched(tree, [1, 2], salt=1) == ([], None, 0)
    assert encode([1, 2], (0, 0), 0) == encode([1, 2], None, 0) != encode([1, 2], (0, 5), 0)
    assert encode([1, 2], (9, 9, 0), 2) == encode([1, 2], None, 0), "generated tokens have no extra ids"


def test_inserting_known_tokens_returns_the_existing_node() -> None:
    tree = BlockTree(2)
    root = tree.root(None, None)
    first = tree.insert(root, encode([1, 2], None, 0), 3, DEFAULT_RETENTION)
    assert tree.insert(root, encode([1, 2], None, 0), 4, DEFAULT_RETENTION) is first
    assert (4 in tree, len(tree)) == (False, 1)


def test_least_recently_used_leaves_are_evicted_first() -> None:
    tree = BlockTree(2)
    root = tree.root(None, None)
    _store(tree, root, [1, 2], [3, 4], first=0)
    _store(tree, root, [5, 6], first=2)
    tree.claim(0)
    tree.claim(1)
    tree.retire(1)
    tree.retire(0)
    assert tree.free == 3
    assert [tree.evict() for _ in range(3)] == [2, 1, 0]
    assert (tree.free, len(tree)) == (0, 0)
    with pytest.raises(IndexError):
        tree.evict()


def test_block_in_use_is_never_evicted() -> None:
    tree = BlockTree(2)
    _store(tree, tree.root(None, None), [1, 2], first=0)
    tree.claim(0)
    with pytest.raises(IndexError):
        tree.evict()


def test_lower_priorities_are_evicted_first_within_their_duration() -> None:
    clock = _Clock()
    tree = BlockTree(1, clock=clock)
    root = tree.root(None, None)
    _store(tree, root, [1], first=0, retention=Retention(90, 10.0))
    _store(tree, root, [2], first=1)
    _store(tree, root, [3], first=2)
    _store(tree, root, [4], first=3, retention=Retention(10))
    assert tree.evict() == 3
    clock.now = 9.9
    assert tree.evict() == 1
    clock.now = 10.0
    assert tree.evict() == 0, "at the default priority, and used before block 2"


def test_each_use_restarts_the_duration() -> None:
    clock = _Clock()
    tree = BlockTree(1, clock=clock)
    root = tree.root(None, None)
    _store(tree, root, [1], first=0, retention=Retention(90, 10.0))
    clock.now = 8.0
    tree.claim(0)
    tree.retire(0)
    _store(tree, root, [2], first=1)
    clock.now = 12.0
    assert tree.evict() == 1


def test_eviction_heaps_stay_bounded() -> None:
    """Entries of earlier uses and roots of other salts are removed with their blocks."""
    tree = BlockTree(1, clock=_Clock())
    _store(tree, tree.root(None, None), [1], first=0, retention=Retention(50, 1000.0))
    for salt in range(1000):
        tree.claim(0)
        tree.retire(0)
        _store(tree, tree.root(None, salt), [1], first=1)
        assert tree.evict() == 1
    assert len(tree._evictable) < 100
    assert len(tree._expiring) < 100
    assert len(tree._roots) == 1


def test_dropped_root_returns_with_its_next_block() -> None:
    tree = BlockTree(1)
    root = tree.root(None, 7)
    _store(tree, root, [1], first=0)
    tree.evict()
    _store(tree, tree.root(None, 7), [2], first=1)
    _store(tree, root, [3], first=2)
    assert (_matched(tree, [2], salt=7)[0], _matched(tree, [3], salt=7)[0]) == ([1], [2])


@pytest.mark.parametrize(
    ("first", "generated", "expected"),
    [
        (0, False, Retention(80, 2.0)),
        (7, False, Retention(80, 2.0)),
        (8, False, DEFAULT_RETENTION),
        (16, False, Retention(5)),
        (99, False, Retention(5)),
        (99, True, Retention(60, 3.0)),
    ],
)
def test_retention_of_a_block(first: int, generated: bool, expected: Retention) -> None:
    rules = RetentionRules(((0, 8, Retention(80, 2.0)), (16, None, Retention(5))), Retention(60, 3.0))
    assert retention_of(rules, first, generated=generated) == expected
    assert retention_of(None, first, generated=generated) == DEFAULT_RETENTION

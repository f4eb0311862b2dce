"""The block pool and the block table: no block is lost or given out twice, and shared blocks are equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trtserve.executor.engine.blocks import BlockPool, Retention, RetentionRules
from trtserve.executor.engine.kv_cache import Allocation, CacheKey, KvCache
from trtserve.executor.engine.requests import BlockUse


def _cache(blocks: int, *, size: int = 4, rows: int = 8, longest: int = 40, **options: Any) -> KvCache:
    copies: list[tuple[int, int]] = options.pop("copies", [])
    return KvCache(
        blocks=blocks,
        tokens_per_block=size,
        max_rows=rows,
        max_tokens=longest,
        copy_block=lambda source, target: copies.append((source, target)),
        **options,
    )


def _key(tokens: int | list[int], **options: Any) -> CacheKey:
    values = range(tokens) if isinstance(tokens, int) else tokens
    return CacheKey(np.array(values, dtype=np.int64), **options)


def _start(cache: KvCache, key: CacheKey, reserve: int, width: int = 1, use: BlockUse | None = None) -> Allocation:
    allocation = cache.start(key, reserve=reserve, width=width, use=use or BlockUse())
    assert allocation is not None
    return allocation


def _run(cache: KvCache, key: CacheKey, use: BlockUse | None = None) -> tuple[list[int], int]:
    """Compute a context and end it; return its blocks and the number of reused tokens."""
    allocation = _start(cache, key, len(key.tokens), use=use)
    (slot,) = allocation.slots
    cache.extend(slot, len(key.tokens))
    cache.register_full_blocks(slot, key.tokens)
    blocks = cache.table[slot, : cache.counts[slot]].tolist()
    cache.free(allocation.slots, key.tokens)
    return blocks, allocation.reused_tokens


def test_block_is_free_after_its_last_reference() -> None:
    pool = BlockPool(2)
    block = pool.acquire()
    pool.share(block)
    pool.release(block)
    assert pool.free == 1
    pool.release(block)
    assert pool.free == 2
    with pytest.raises(ValueError, match="is free"):
        pool.release(block)
    with pytest.raises(ValueError, match="is free"):
        pool.share(block)


def test_empty_pool_raises() -> None:
    pool = BlockPool(1)
    pool.acquire()
    with pytest.raises(IndexError):
        pool.acquire()


def test_start_reserves_all_blocks_of_a_sequence() -> None:
    cache = _cache(5)
    allocation = _start(cache, _key(3), 10)
    assert (cache.available, cache.pool.free) == (2, 5)
    assert cache.start(_key(3), reserve=9, width=1, use=BlockUse()) is None
    assert cache.extend(allocation.slots[0], 5) == 8
    assert (cache.available, cache.pool.free) == (2, 3)
    cache.free(allocation.slots, [])
    assert (cache.available, cache.pool.free) == (5, 5)


def test_slots_limit_the_number_of_sequences() -> None:
    cache = _cache(9, rows=2)
    assert cache.start(_key(1), reserve=1, width=3, use=BlockUse()) is None
    _start(cache, _key(1), 1, width=2)
    assert cache.start(_key(1), reserve=1, width=1, use=BlockUse()) is None


def test_indices_list_the_blocks_of_each_slot() -> None:
    cache = _cache(6, size=2, rows=2)
    (first,), (second,) = _start(cache, _key(1), 6).slots, _start(cache, _key(1), 4).slots
    cache.extend(first, 1)
    cache.extend(second, 3)
    cache.extend(first, 5)
    expected = [*cache.table[second, :2].tolist(), *cache.table[first, :3].tolist()]
    slots = np.array([second, first])
    assert cache.indices(slots, cache.counts[slots]).tolist() == expected
    assert cache.indices(slots, np.array([1, 3], np.int32)).tolist() == [expected[0], *expected[2:]]
    assert len(set(expected)) == 5


def test_reservations_can_grow_step_by_step() -> None:
    cache = _cache(3)
    (slot,) = _start(cache, _key(4), 4).slots
    assert cache.reserve((slot,), 8)
    assert cache.available == 1
    assert cache.reserve((slot,), 8)
    assert cache.available == 1
    assert not cache.reserve((slot,), 13)
    assert cache.available == 1
    assert cache.extend(slot, 8) == 8


@pytest.mark.parametrize(
    ("prompt", "reserve", "width", "blocks"),
    [(8, 12, 2, 2 + 2), (9, 12, 2, 2 + 2), (9, 13, 3, 2 + 6), (3, 8, 4, 8), (9, 13, 1, 4)],
)
def test_beams_share_the_full_blocks_of_the_prompt(prompt: int, reserve: int, width: int, blocks: int) -> None:
    cache = _cache(blocks)
    allocation = _start(cache, _key(prompt), reserve, width)
    assert (len(allocation.slots), cache.available) == (width, 0)
    assert _cache(blocks - 1).start(_key(prompt), reserve=reserve, width=width, use=BlockUse()) is None


def test_fork_copies_only_the_partial_block() -> None:
    copies: list[tuple[int, int]] = []
    cache = _cache(9, copies=copies)
    slots = _start(cache, _key(6), 12, 3).slots
    cache.extend(slots[0], 6)
    cache.fork(slots, 6)
    rows = cache.table[list(slots), :2].tolist()
    assert len({row[0] for row in rows}) == 1
    assert len({row[1] for row in rows}) == 3
    assert copies == [(rows[0][1], rows[1][1]), (rows[0][1], rows[2][1])]


def test_beams_follow_their_parents_without_extra_blocks() -> None:
    copies: list[tuple[int, int]] = []
    cache = _cache(5, copies=copies)
    slots = _start(cache, _key(4), 12, 2).slots
    cache.extend(slots[0], 4)
    cache.fork(slots, 4)
    for slot in slots:
        cache.extend(slot, 9)
    assert cache.pool.free == 0
    second = cache.table[slots[1], :3].tolist()
    cache.reorder(slots, [1, 1], 9)
    assert cache.table[slots[0], :2].tolist() == second[:2]
    assert cache.table[slots[1], :3].tolist() == second
    assert copies == [(second[2], cache.table[slots[0], 2])]
    assert cache.pool.free == 1
    cache.reorder(slots, [1, 0], 9)
    assert len(copies) == 1, "beams that change places need no copy"
    cache.free(slots, [])
    assert cache.available == 5


def test_prefix_is_reused_up_to_the_last_token() -> None:
    cache = _cache(20, reuse=True)
    blocks, reused = _run(cache, _key(12))
    assert reused == 0
    assert cache.pool.free == 20
    again, reused = _run(cache, _key(12))
    assert (again, reused) == (blocks, 11)
    longer, reused = _run(cache, _key(14))
    assert (longer[:3], reused) == (blocks, 12)


def test_nothing_is_kept_without_reuse() -> None:
    cache = _cache(20)
    _run(cache, _key(12))
    assert _run(cache, _key(12))[1] == 0
    assert (cache.reused_total, cache.missed_total, cache.allocated_total) == (0, 0, 6)


@pytest.mark.parametrize(
    "other",
    [{"adapter": 1}, {"salt": 1}, {"extra_ids": (5,) * 12}, {"reusable": False}],
)
def test_other_keys_prevent_reuse(other: dict[str, Any]) -> None:
    cache = _cache(20, reuse=True)
    _run(cache, _key(12))
    assert _run(cache, _key(12, **other))[1] == 0


def test_unstored_sequences_are_not_reused() -> None:
    cache = _cache(20, reuse=True)
    _run(cache, _key(12, stored=False))
    assert _run(cache, _key(12))[1] == 0


def test_block_use_is_counted() -> None:
    cache = _cache(4, reuse=True)
    uses = [BlockUse(), BlockUse(), BlockUse()]
    _run(cache, _key(10), uses[0])
    _run(cache, _key([*range(4), 90, 91, 92, 93, 94]), uses[1])
    assert uses[0] == BlockUse(total=3, new=3, reused=0, missed=3)
    # One block was never used; the other is the last of the first sequence, which is a free leaf.
    assert uses[1] == BlockUse(total=2, new=1, reused=1, missed=2)
    assert (cache.allocated_total, cache.new_total, cache.reused_total, cache.missed_total) == (5, 4, 1, 5)


def test_partial_reuse_can_be_disabled() -> None:
    cache = _cache(20, reuse=True, partial_reuse=False)
    _run(cache, _key(12))
    assert _run(cache, _key(12))[1] == 8
    assert _run(cache, _key([0, 1, 2, 3, 4, 50]))[1] == 4


@pytest.mark.parametrize("copied", [True, False])
def test_partial_block_in_use_is_copied_if_allowed(copied: bool) -> None:
    copies: list[tuple[int, int]] = []
    cache = _cache(20, reuse=True, copy_on_partial_reuse=copied, copies=copies)
    (holder,) = _start(cache, _key(8), 12).slots
    cache.extend(holder, 8)
    cache.register_full_blocks(holder, list(range(8)))
    allocation = _start(cache, _key([0, 1, 2, 3, 4, 5, 60, 61]), 12)
    (slot,) = allocation.slots
    assert allocation.reused_tokens == (6 if copied else 4)
    assert cache.table[slot, 0] == cache.table[holder, 0]
    assert copies == ([(cache.table[holder, 1], cache.table[slot, 1])] if copied else [])


def test_free_leaf_is_taken_for_a_partial_match() -> None:
    copies: list[tuple[int, int]] = []
    cache = _cache(20, reuse=True, copy_on_partial_reuse=False, copies=copies)
    blocks, _ = _run(cache, _key(8))
    again, reused = _run(cache, _key([0, 1, 2, 3, 4, 5, 60, 61]))
    assert (again, reused, copies) == (blocks, 6, [])
    assert _run(cache, _key(8))[1] == 6, "the former end is overwritten"


def test_source_of_a_copy_is_not_evicted() -> None:
    """The block that is copied is not evicted to make space for the copy."""
    copies: list[tuple[int, int]] = []
    cache = _cache(3, reuse=True, copies=copies)
    blocks, _ = _run(cache, _key(12))
    allocation = _start(cache, _key([0, 1, 2, 3, 4, 5, 60]), 8)
    (slot,) = allocation.slots
    assert allocation.reused_tokens == 6
    assert copies == [(blocks[1], blocks[2])]
    assert cache.table[slot, :2].tolist() == [blocks[0], blocks[2]]


def test_generated_blocks_are_reusable_at_once() -> None:
    cache = _cache(20, reuse=True)
    (slot,) = _start(cache, _key(3), 12).slots
    cache.extend(slot, 8)
    cache.register_full_blocks(slot, list(range(7)))
    assert _run(cache, _key(6))[1] == 4
    cache.register_full_blocks(slot, list(range(8)))
    assert _run(cache, _key(9))[1] == 8


def test_equal_blocks_computed_twice_are_merged() -> None:
    cache = _cache(20, reuse=True)
    (first,), (second,) = _start(cache, _key(8), 8).slots, _start(cache, _key(8), 8).slots
    for slot in (first, second):
        cache.extend(slot, 8)
    assert cache.pool.free == 16
    for slot in (first, second):
        cache.register_full_blocks(slot, list(range(8)))
    assert cache.pool.free == 18
    assert cache.table[first, :2].tolist() == cache.table[second, :2].tolist()


def test_beams_reuse_whole_blocks_and_store_none() -> None:
    cache = _cache(20, reuse=True)
    blocks, _ = _run(cache, _key(8))
    allocation = _start(cache, replace(_key(8), stored=False), 12, 2)
    assert allocation.reused_tokens == 4
    cache.extend(allocation.slots[0], 8)
    cache.fork(allocation.slots, 8)
    assert cache.table[allocation.slots[1], 0] == blocks[0]
    cache.free(allocation.slots, [])
    assert cache.available == 20


def test_reusing_a_free_block_counts_as_allocating_one() -> None:
    cache = _cache(4, reuse=True)
    _run(cache, _key(12))
    assert cache.start(_key(12), reserve=17, width=1, use=BlockUse()) is None
    allocation = _start(cache, _key(12), 16)
    assert cache.available == 0
    assert cache.extend(allocation.slots[0], 16) == 16
    shared = cache.start(_key([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]), reserve=13, width=1, use=BlockUse())
    assert shared is None


def test_priorities_decide_which_blocks_stay() -> None:
    keep = RetentionRules(((0, 4, Retention(90)),), Retention(5))
    cache = _cache(3, reuse=True)
    _run(cache, replace(_key(4), retention=keep))
    _run(cache, _key([50, 51, 52, 53]))
    _run(cache, _key([60, 61, 62, 63, 64, 65, 66, 67]))
    assert _run(cache, _key(4))[1] == 3
    assert _run(cache, _key([50, 51, 52, 53]))[1] == 0


def test_a_sequence_changes_the_retention_of_the_blocks_that_it_reuses() -> None:
    now, cache = 0.0, _cache(3, reuse=True)
    cache.tree._clock = lambda: now
    others = [_key([first, 51, 52, 53]) for first in (50, 60, 70, 80)]
    _run(cache, _key(8))
    _run(cache, replace(_key(8), retention=RetentionRules(((0, 4, Retention(90, 10.0)),))))
    for other in others:
        _run(cache, other)
    assert _run(cache, _key(5))[1] == 4
    _run(cache, replace(_key(5), retention=None))  # one that asks for nothing leaves it
    for other in others:
        _run(cache, other)
    assert _run(cache, _key(5))[1] == 4
    now = 11.0
    for other in others:
        _run(cache, other)
    assert _run(cache, _key(5))[1] == 0


def test_first_missing_block_is_identified_by_its_whole_context() -> None:
    cache = _cache(20, reuse=True)
    assert cache.next_missing(_key(4)) is None, "the last token is always computed"
    assert cache.next_missing(_key(5)) == cache.next_missing(_key([0, 1, 2, 3, 9])) is not None
    assert cache.next_missing(_key(5)) != cache.next_missing(_key(5, salt=3))
    _run(cache, _key(4))
    assert cache.next_missing(_key(5)) is None
    assert cache.next_missing(_key(9)) is not None
    assert cache.next_missing(replace(_key(9), reusable=False)) is None

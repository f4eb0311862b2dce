"""The block pool and the block rows: nothing is lost, nothing is given twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trtserve.executor.kv_cache import BlockPool, KvCache


def test_a_block_returns_with_its_last_reference() -> None:
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


def test_an_empty_pool_refuses() -> None:
    pool = BlockPool(1)
    pool.acquire()
    with pytest.raises(IndexError):
        pool.acquire()


def test_start_sets_blocks_aside_to_the_end() -> None:
    cache = KvCache(blocks=5, tokens_per_block=4, max_sequences=4, max_tokens=20)
    slot = cache.start(10)
    assert slot is not None
    assert (cache.available, cache.pool.free) == (2, 5)
    assert cache.start(9) is None
    assert cache.extend(slot, 5) == 8
    assert (cache.available, cache.pool.free) == (2, 3)
    cache.finish(slot)
    assert (cache.available, cache.pool.free) == (5, 5)


def test_slots_limit_the_sequences() -> None:
    cache = KvCache(blocks=5, tokens_per_block=4, max_sequences=1, max_tokens=20)
    assert cache.start(1) is not None
    assert cache.start(1) is None


def test_indices_list_the_blocks_of_each_slot_in_order() -> None:
    cache = KvCache(blocks=6, tokens_per_block=2, max_sequences=2, max_tokens=8)
    first, second = cache.start(6), cache.start(4)
    assert first is not None
    assert second is not None
    cache.extend(first, 1)
    cache.extend(second, 3)
    cache.extend(first, 5)
    expected = [*cache.table[second, :2].tolist(), *cache.table[first, :3].tolist()]
    assert cache.indices(np.array([second, first])).tolist() == expected
    assert len(set(expected)) == 5


@pytest.mark.parametrize("seed", range(5))
def test_random_lives_never_leak_or_share_a_block(seed: int) -> None:
    random_source = random.Random(seed)
    cache = KvCache(blocks=30, tokens_per_block=3, max_sequences=8, max_tokens=40)
    living: dict[int, tuple[int, int]] = {}
    for _ in range(600):
        action = random_source.choice(["start", "extend", "extend", "finish"])
        if action == "start":
            tokens = random_source.randint(1, 40)
            slot = cache.start(tokens)
            if slot is not None:
                assert slot not in living
                living[slot] = (tokens, 0)
        elif living and action == "extend":
            slot = random_source.choice(list(living))
            tokens, done = living[slot]
            done = random_source.randint(done, tokens)
            assert cache.extend(slot, done) >= done
            living[slot] = (tokens, done)
        elif living:
            slot = random_source.choice(list(living))
            cache.finish(slot)
            del living[slot]
        _check(cache, living)
    for slot in living:
        cache.finish(slot)
    _check(cache, {})
    assert cache.available == 30


def _check(cache: KvCache, living: dict[int, tuple[int, int]]) -> None:
    used = [block for slot in living for block in cache.table[slot, : cache.counts[slot]].tolist()]
    assert len(set(used)) == len(used)
    assert len(used) + cache.pool.free == cache.pool.count
    to_the_end = sum(cache.blocks_for(tokens) for tokens, _ in living.values())
    assert cache.available == cache.pool.count - to_the_end >= 0

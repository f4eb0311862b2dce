"""The scheduler's policies, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trtserve.executor.api import CapacitySchedulerPolicy, ContextChunkingPolicy
from trtserve.executor.kv_cache import KvCache
from trtserve.executor.limits import Limits
from trtserve.executor.scheduler import Plan, Scheduler
from trtserve.executor.sequence import Sequence


def _scheduler(
    *, blocks: int = 100, batch: int = 8, tokens: int = 64, chunked: bool = False, **options: Any
) -> Scheduler:
    limits = Limits(max_batch_size=batch, max_seq_len=200, max_num_tokens=tokens, vocab_size=97, chunked=chunked)
    cache = KvCache(blocks=blocks, tokens_per_block=4, max_sequences=batch, max_tokens=200)
    return Scheduler(limits, cache, **options)


def _add(scheduler: Scheduler, number: int, prompt: int, new: int = 4) -> Sequence:
    sequence = Sequence(id=number, prompt=np.arange(prompt, dtype=np.int64), max_tokens=new)
    scheduler.add(sequence)
    return sequence


def _run(scheduler: Scheduler) -> Plan:
    """Plan one step and count its tokens as computed."""
    plan = scheduler.plan()
    for sequence, size in plan.chunks:
        sequence.computed += size
    for sequence in plan.generations:
        sequence.computed += 1
    return plan


def _shape(plan: Plan) -> tuple[list[tuple[int, int]], list[int]]:
    return [(sequence.id, size) for sequence, size in plan.chunks], [sequence.id for sequence in plan.generations]


def test_prompts_join_running_generations() -> None:
    scheduler = _scheduler()
    _add(scheduler, 1, 5)
    assert _shape(_run(scheduler)) == ([(1, 5)], [])
    _add(scheduler, 2, 6)
    assert _shape(_run(scheduler)) == ([(2, 6)], [1])
    assert _shape(_run(scheduler)) == ([], [1, 2])


def test_nobody_overtakes_one_that_lacks_blocks() -> None:
    scheduler = _scheduler(blocks=6)
    first = _add(scheduler, 1, 12, 4)
    _add(scheduler, 2, 12, 4)
    _add(scheduler, 3, 1, 1)
    assert _shape(_run(scheduler)) == ([(1, 12)], [])
    assert [sequence.id for sequence in scheduler.pending] == [2, 3]
    scheduler.remove([first])
    assert _shape(_run(scheduler)) == ([(2, 12), (3, 1)], [])


def test_blocks_are_counted_to_the_end_not_to_the_prompt() -> None:
    scheduler = _scheduler(blocks=6)
    _add(scheduler, 1, 4, 16)
    _add(scheduler, 2, 4, 4)
    assert _shape(_run(scheduler)) == ([(1, 4)], [])


def test_the_first_prompt_over_the_budget_ends_the_pass() -> None:
    scheduler = _scheduler(tokens=10)
    for number, prompt in enumerate((6, 6, 2), start=1):
        _add(scheduler, number, prompt)
    assert _shape(_run(scheduler)) == ([(1, 6)], [])
    assert _shape(_run(scheduler)) == ([(2, 6), (3, 2)], [1])


def test_static_batch_waits_until_nothing_runs() -> None:
    scheduler = _scheduler(policy=CapacitySchedulerPolicy.STATIC_BATCH)
    first = _add(scheduler, 1, 3)
    _run(scheduler)
    _add(scheduler, 2, 3)
    assert _shape(_run(scheduler)) == ([], [1])
    scheduler.remove([first])
    assert _shape(_run(scheduler)) == ([(2, 3)], [])


def test_chunks_first_come_first_served() -> None:
    scheduler = _scheduler(tokens=10, chunked=True)
    _add(scheduler, 1, 11)
    _add(scheduler, 2, 9)
    # 10 tokens: 8 for the first (a multiple of the block), and no whole unit is left for the second
    assert _shape(_run(scheduler)) == ([(1, 8)], [])
    assert _shape(_run(scheduler)) == ([(1, 3), (2, 4)], [])
    assert _shape(_run(scheduler)) == ([(2, 5)], [1])
    assert _shape(_run(scheduler)) == ([], [1, 2])


def test_chunks_of_equal_progress() -> None:
    scheduler = _scheduler(tokens=16, chunked=True, chunking=ContextChunkingPolicy.EQUAL_PROGRESS)
    _add(scheduler, 1, 20)
    _add(scheduler, 2, 9)
    _add(scheduler, 3, 2)
    assert _shape(_run(scheduler)) == ([(1, 8), (2, 4), (3, 2)], [])


def test_prompts_that_all_fit_run_whole_under_chunking() -> None:
    scheduler = _scheduler(tokens=16, chunked=True, chunking=ContextChunkingPolicy.EQUAL_PROGRESS)
    _add(scheduler, 1, 7)
    _add(scheduler, 2, 9)
    assert _shape(_run(scheduler)) == ([(1, 7), (2, 9)], [])


def test_a_budget_below_one_block_still_makes_progress() -> None:
    scheduler = _scheduler(tokens=3, chunked=True)
    _add(scheduler, 1, 8)
    assert [_shape(_run(scheduler))[0] for _ in range(3)] == [[(1, 3)], [(1, 3)], [(1, 2)]]


def test_generations_count_against_the_budget_of_chunks() -> None:
    scheduler = _scheduler(tokens=9, chunked=True)
    _add(scheduler, 1, 4)
    _run(scheduler)
    _add(scheduler, 2, 20)
    assert _shape(_run(scheduler)) == ([(2, 8)], [1])


@pytest.mark.parametrize("chunked", [False, True])
def test_room_counts_running_and_pending(chunked: bool) -> None:
    scheduler = _scheduler(blocks=6, batch=3, chunked=chunked)
    _add(scheduler, 1, 12)
    _add(scheduler, 2, 12)
    _run(scheduler)
    assert (scheduler.room, len(scheduler.running), len(scheduler.pending)) == (1, 1, 1)

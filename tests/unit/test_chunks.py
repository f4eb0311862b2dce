"""Chunking of contexts: sizes and order of the chunks in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.schedulers import add, make_scheduler, make_sequence, paused, run_step, shape
from trtserve.executor.api import CapacitySchedulerPolicy, ContextChunkingPolicy

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


def test_first_come_first_served_chunks() -> None:
    scheduler = make_scheduler(tokens=10, chunked=True)
    add(scheduler, 1, 11)
    add(scheduler, 2, 9)
    # 10 tokens: 8 for the first (a multiple of the block); the rest is less than a unit
    assert shape(run_step(scheduler)) == ([(1, 8)], [])
    # chunks that end a context come last
    assert shape(run_step(scheduler)) == ([(2, 4), (1, 3)], [])
    assert shape(run_step(scheduler)) == ([(2, 5)], [1])
    assert shape(run_step(scheduler)) == ([], [1, 2])


def test_equal_progress_chunks() -> None:
    scheduler = make_scheduler(tokens=16, chunked=True, chunking=ContextChunkingPolicy.EQUAL_PROGRESS)
    add(scheduler, 1, 20)
    add(scheduler, 2, 9)
    add(scheduler, 3, 2)
    assert shape(run_step(scheduler)) == ([(1, 8), (2, 4), (3, 2)], [])


def test_prompts_that_fit_are_not_split() -> None:
    scheduler = make_scheduler(tokens=16, chunked=True, chunking=ContextChunkingPolicy.EQUAL_PROGRESS)
    add(scheduler, 1, 7)
    add(scheduler, 2, 9)
    assert shape(run_step(scheduler)) == ([(1, 7), (2, 9)], [])


def test_budget_below_one_block_still_makes_progress() -> None:
    scheduler = make_scheduler(tokens=3, chunked=True)
    add(scheduler, 1, 8)
    assert [shape(run_step(scheduler))[0] for _ in range(3)] == [[(1, 3)], [(1, 3)], [(1, 2)]]


def test_generations_reduce_the_budget_of_chunks() -> None:
    scheduler = make_scheduler(tokens=9, chunked=True)
    add(scheduler, 1, 4)
    run_step(scheduler)
    add(scheduler, 2, 20)
    assert shape(run_step(scheduler)) == ([(2, 8)], [1])


@pytest.mark.parametrize(("windows", "size"), [((), 300), ((150,), 256)])
def test_chunk_unit_is_larger_with_attention_windows(windows: tuple[int, ...], size: int) -> None:
    scheduler = make_scheduler(blocks=200, tokens=300, chunked=True, windows=windows)
    add(scheduler, 1, 400)
    assert shape(scheduler.plan_step())[0] == [(1, size)]


def test_steps_are_ordered_by_adapter() -> None:
    scheduler = make_scheduler()
    for number, task in enumerate((7, None, 3), start=1):
        sequence = make_sequence(number, 4, adapter=task)
        sequence.key = replace(sequence.key, adapter=task)
        scheduler.add(sequence)
    assert shape(run_step(scheduler)) == ([(2, 4), (3, 4), (1, 4)], [])
    assert shape(run_step(scheduler)) == ([], [2, 3, 1])


def test_draft_tokens_count_for_the_budget() -> None:
    scheduler = make_scheduler(tokens=10)
    add(scheduler, 1, 4, draft=(1, 2, 3))
    add(scheduler, 2, 4)
    assert shape(run_step(scheduler)) == ([(1, 4)], [])


def test_draft_tokens_follow_the_last_chunk_as_far_as_they_fit() -> None:
    scheduler = make_scheduler(tokens=10, chunked=True)
    first, second = add(scheduler, 1, 6, draft=(1, 2, 3)), add(scheduler, 2, 11, draft=(1, 2, 3, 4))
    assert shape(run_step(scheduler)) == ([(2, 4), (1, 6)], [])
    assert (first.draft, second.draft) == ((), (1, 2, 3, 4))
    assert shape(run_step(scheduler)) == ([(2, 7)], [1])
    assert second.draft == (1, 2)


def test_context_longer_than_a_step_after_a_pause_is_split() -> None:
    scheduler = make_scheduler(blocks=7, tokens=10, policy=MAX_UTILIZATION)
    first = add(scheduler, 1, 8, 12)
    low = add(scheduler, 2, 6, 12, priority=0.1)
    while not (plan := run_step(scheduler)).paused:
        assert len(low.generated) < 12
    assert paused(plan) == [2]
    assert low.context_left > 10
    scheduler.remove([first])
    sizes = [shape(run_step(scheduler))[0] for _ in range(2)]
    assert sizes == [[(2, 8)], [(2, low.context_length - 8)]]


def test_reused_tokens_are_skipped_and_chunks_end_at_blocks() -> None:
    scheduler = make_scheduler(tokens=10, chunked=True, reuse=True)
    first = add(scheduler, 1, 6)
    run_step(scheduler)
    scheduler.remove([first])
    second = add(scheduler, 2, 30)
    assert shape(run_step(scheduler)) == ([(2, 10)], [])
    assert second.computed == 16, "6 reused and 10 computed"
    assert shape(run_step(scheduler)) == ([(2, 8)], [])

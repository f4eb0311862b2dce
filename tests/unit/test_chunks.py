"""How much of each context runs in a step, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.schedulers import add, make_scheduler, make_sequence, paused, run_step, shape
from trtserve.executor.api import CapacitySchedulerPolicy, ContextChunkingPolicy

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


def test_chunks_first_come_first_served() -> None:
    scheduler = make_scheduler(tokens=10, chunked=True)
    add(scheduler, 1, 11)
    add(scheduler, 2, 9)
    # 10 tokens: 8 for the first (a multiple of the block), and no whole unit is left for the second
    assert shape(run_step(scheduler)) == ([(1, 8)], [])
    # chunks that end a context stand last
    assert shape(run_step(scheduler)) == ([(2, 4), (1, 3)], [])
    assert shape(run_step(scheduler)) == ([(2, 5)], [1])
    assert shape(run_step(scheduler)) == ([], [1, 2])


def test_chunks_of_equal_progress() -> None:
    scheduler = make_scheduler(tokens=16, chunked=True, chunking=ContextChunkingPolicy.EQUAL_PROGRESS)
    add(scheduler, 1, 20)
    add(scheduler, 2, 9)
    add(scheduler, 3, 2)
    assert shape(run_step(scheduler)) == ([(1, 8), (2, 4), (3, 2)], [])


def test_prompts_that_all_fit_run_whole_under_chunking() -> None:
    scheduler = make_scheduler(tokens=16, chunked=True, chunking=ContextChunkingPolicy.EQUAL_PROGRESS)
    add(scheduler, 1, 7)
    add(scheduler, 2, 9)
    assert shape(run_step(scheduler)) == ([(1, 7), (2, 9)], [])


def test_a_budget_below_one_block_still_makes_progress() -> None:
    scheduler = make_scheduler(tokens=3, chunked=True)
    add(scheduler, 1, 8)
    assert [shape(run_step(scheduler))[0] for _ in range(3)] == [[(1, 3)], [(1, 3)], [(1, 2)]]


def test_generations_count_against_the_budget_of_chunks() -> None:
    scheduler = make_scheduler(tokens=9, chunked=True)
    add(scheduler, 1, 4)
    run_step(scheduler)
    add(scheduler, 2, 20)
    assert shape(run_step(scheduler)) == ([(2, 8)], [1])


@pytest.mark.parametrize(("windows", "size"), [((), 300), ((150,), 256)])
def test_the_unit_is_larger_where_contexts_pass_the_window(windows: tuple[int, ...], size: int) -> None:
    scheduler = make_scheduler(blocks=200, tokens=300, chunked=True, windows=windows)
    add(scheduler, 1, 400)
    assert shape(scheduler.plan())[0] == [(1, size)]


def test_a_step_is_ordered_by_adapter() -> None:
    scheduler = make_scheduler()
    for number, task in enumerate((7, None, 3), start=1):
        sequence = make_sequence(number, 4, adapter=task)
        sequence.key = replace(sequence.key, adapter=task)
        scheduler.add(sequence)
    assert shape(run_step(scheduler)) == ([(2, 4), (3, 4), (1, 4)], [])
    assert shape(run_step(scheduler)) == ([], [2, 3, 1])


def test_a_draft_is_part_of_what_a_prompt_costs() -> None:
    scheduler = make_scheduler(tokens=10)
    add(scheduler, 1, 4, draft=(1, 2, 3))
    add(scheduler, 2, 4)
    assert shape(run_step(scheduler)) == ([(1, 4)], [])


def test_drafts_ride_with_the_last_chunk_as_far_as_they_fit() -> None:
    scheduler = make_scheduler(tokens=10, chunked=True)
    first, second = add(scheduler, 1, 6, draft=(1, 2, 3)), add(scheduler, 2, 11, draft=(1, 2, 3, 4))
    assert shape(run_step(scheduler)) == ([(2, 4), (1, 6)], [])
    assert (first.draft, second.draft) == ((), (1, 2, 3, 4))
    assert shape(run_step(scheduler)) == ([(2, 7)], [1])
    assert second.draft == (1, 2)


def test_a_context_that_outgrew_a_step_comes_in_chunks() -> None:
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


def test_reused_tokens_are_not_computed_and_chunks_end_at_blocks() -> None:
    scheduler = make_scheduler(tokens=10, chunked=True, reuse=True)
    first = add(scheduler, 1, 6)
    run_step(scheduler)
    scheduler.remove([first])
    second = add(scheduler, 2, 30)
    assert shape(run_step(scheduler)) == ([(2, 10)], [])
    assert second.computed == 16, "6 reused and 10 computed"
    assert shape(run_step(scheduler)) == ([(2, 8)], [])

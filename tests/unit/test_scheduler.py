"""Scheduling: capacity policies, pauses, priorities, beam widths, adapters and reuse."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

import pytest

from tests.support.schedulers import add, make_scheduler, make_sequence, paused, run_step, shape
from trtserve.executor.api import CapacitySchedulerPolicy
from trtserve.executor.engine.scheduler import insert_by_priority
from trtserve.executor.engine.sequence import Sequence

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
STATIC = CapacitySchedulerPolicy.STATIC_BATCH


def test_prompts_join_running_generations() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, 5)
    assert shape(run_step(scheduler)) == ([(1, 5)], [])
    add(scheduler, 2, 6)
    assert shape(run_step(scheduler)) == ([(2, 6)], [1])
    assert shape(run_step(scheduler)) == ([], [1, 2])


def test_no_sequence_overtakes_one_that_waits_for_blocks() -> None:
    scheduler = make_scheduler(blocks=6)
    first = add(scheduler, 1, 12, 4)
    waiting = add(scheduler, 2, 12, 4)
    add(scheduler, 3, 1, 1)
    assert shape(run_step(scheduler)) == ([(1, 12)], [])
    assert not waiting.slots
    scheduler.remove([first])
    assert shape(run_step(scheduler)) == ([(2, 12), (3, 1)], [])


def test_all_blocks_of_a_sequence_are_reserved_at_its_start() -> None:
    scheduler = make_scheduler(blocks=6)
    add(scheduler, 1, 4, 16)
    add(scheduler, 2, 4, 4)
    assert shape(run_step(scheduler)) == ([(1, 4)], [])


def test_first_prompt_over_the_budget_ends_the_pass() -> None:
    scheduler = make_scheduler(tokens=10)
    for number, prompt in enumerate((6, 6, 2), start=1):
        add(scheduler, number, prompt)
    assert shape(run_step(scheduler)) == ([(1, 6)], [])
    assert shape(run_step(scheduler)) == ([(2, 6), (3, 2)], [1])


def test_static_batch_waits_until_nothing_runs() -> None:
    scheduler = make_scheduler(policy=STATIC)
    first = add(scheduler, 1, 3)
    run_step(scheduler)
    add(scheduler, 2, 3)
    assert shape(run_step(scheduler)) == ([], [1])
    scheduler.remove([first])
    assert shape(run_step(scheduler)) == ([(2, 3)], [])


@pytest.mark.parametrize("chunked", [False, True])
def test_sequences_waiting_for_blocks_count_for_the_batch_size(chunked: bool) -> None:
    scheduler = make_scheduler(blocks=6, batch=3, chunked=chunked)
    add(scheduler, 1, 12)
    add(scheduler, 2, 12)
    run_step(scheduler)
    assert [bool(sequence.slots) for sequence in scheduler.active] == [True, False]
    queue = deque([make_sequence(3, 4), make_sequence(4, 4)])
    for expected in (3, None):
        taken = scheduler.take(queue)
        assert (None if taken is None else taken.id) == expected
        if taken is not None:
            scheduler.add(taken)


def test_sequences_run_by_priority_then_by_arrival() -> None:
    scheduler = make_scheduler(tokens=12)
    for number, priority in enumerate((0.5, 0.9, 0.5, 0.9, 0.1), start=1):
        add(scheduler, number, 4, priority=priority)
    assert [sequence.id for sequence in scheduler.active] == [2, 4, 1, 3, 5]
    assert shape(run_step(scheduler)) == ([(2, 4), (4, 4), (1, 4)], [])


def test_full_batch_accepts_higher_priorities() -> None:
    scheduler = make_scheduler(batch=2)
    running = [add(scheduler, 1, 4), add(scheduler, 2, 4)]
    run_step(scheduler)
    queue: deque[Sequence] = deque()
    for number, priority in ((3, 0.5), (4, 0.9)):
        insert_by_priority(queue, make_sequence(number, 4, priority=priority))
    taken = scheduler.take(queue)
    assert taken is not None
    assert taken.id == 4
    scheduler.add(taken)
    assert scheduler.take(queue) is None
    assert shape(run_step(scheduler)) == ([], [1, 2]), "it is active, but there is no place in the step"
    scheduler.remove([running[1]])
    assert shape(run_step(scheduler)) == ([(4, 4)], [1])


def test_only_requests_of_the_active_beam_width_leave_the_queue() -> None:
    scheduler = make_scheduler(beams=2)
    queue = deque([make_sequence(1, 4), make_sequence(2, 4, width=2), make_sequence(3, 4)])
    taken = []
    while (sequence := scheduler.take(queue)) is not None:
        scheduler.add(sequence)
        taken.append(sequence.id)
    assert taken == [1, 3]
    scheduler.remove(list(scheduler.active))
    last = scheduler.take(queue)
    assert last is not None
    assert last.id == 2
    assert scheduler.take(queue) is None


def test_a_request_of_another_beam_width_waits_two_seconds_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("trtserve.executor.engine.scheduler.time.monotonic", lambda: now)
    scheduler = make_scheduler(beams=2)
    widths = {1: 1, 2: 2, 3: 1, 4: 1, 5: 1, 6: 2}
    queue = deque(make_sequence(number, 4, width=width, arrival=now) for number, width in widths.items())
    for moment, expected in ((100.0, 1), (100.0, 3), (101.9, 4)):
        now = moment
        sequence = scheduler.take(queue)
        assert sequence is not None
        assert sequence.id == expected
        scheduler.add(sequence)
    now = 102.1
    assert scheduler.take(queue) is None
    scheduler.remove(list(scheduler.active))
    sequence = scheduler.take(queue)
    assert sequence is not None
    assert sequence.id == 2
    scheduler.add(sequence)
    sequence = scheduler.take(queue)  # the others wait since the turn began
    assert sequence is not None
    assert sequence.id == 6


def test_generations_of_another_beam_width_skip_a_step() -> None:
    scheduler = make_scheduler(beams=2, tokens=5)
    for number, width in enumerate((2, 1, 2, 2), start=1):
        add(scheduler, number, 1, width=width)
    run_step(scheduler)
    assert shape(run_step(scheduler)) == ([], [1, 3]), "4 of 5 tokens are used: one generation costs its width"


def test_beams_reserve_their_own_blocks() -> None:
    scheduler = make_scheduler(blocks=7, beams=3)
    sequence = add(scheduler, 1, 6, 4, width=3)
    assert shape(run_step(scheduler)) == ([(1, 6)], [])
    assert (scheduler.cache.available, scheduler.cache.pool.free) == (0, 3)
    scheduler.remove([sequence])
    assert scheduler.cache.available == 7


def test_sequences_whose_adapter_does_not_fit_are_skipped() -> None:
    def fits(adapters: set[Hashable]) -> bool:
        return len(adapters) <= 1

    scheduler = make_scheduler(fits=fits)
    first = add(scheduler, 1, 4, adapter="a")
    add(scheduler, 2, 4, adapter="b")
    add(scheduler, 3, 4, adapter="a")
    add(scheduler, 4, 4)
    assert shape(run_step(scheduler)) == ([(1, 4), (3, 4), (4, 4)], [])
    scheduler.remove([first, scheduler.active[2]])
    assert shape(run_step(scheduler)) == ([(2, 4)], [4])


def test_sequence_started_last_is_paused_and_resumes() -> None:
    scheduler = make_scheduler(blocks=3, policy=MAX_UTILIZATION)
    first, second = add(scheduler, 1, 4, 8), add(scheduler, 2, 3, 5)
    assert shape(run_step(scheduler)) == ([(1, 4), (2, 3)], [])
    assert shape(run_step(scheduler)) == ([], [1, 2])
    plan = run_step(scheduler)
    assert (shape(plan), paused(plan)) == (([], [1]), [2]), "the fourth block is missing"
    assert (second.slots, second.computed, second.context_left) == ((), 0, 5)
    while len(first.generated) < 8:
        assert shape(run_step(scheduler))[0] == []
    scheduler.remove([first])
    assert shape(run_step(scheduler)) == ([(2, 5)], [])
    assert second.generated == [2, 2, 2]


def test_higher_priority_pauses_a_lower_one() -> None:
    scheduler = make_scheduler(blocks=3, policy=MAX_UTILIZATION)
    add(scheduler, 1, 8, 4, priority=0.1)
    run_step(scheduler)
    add(scheduler, 2, 8, 4)
    plan = run_step(scheduler)
    assert (shape(plan), paused(plan)) == (([(2, 8)], []), [1])


def test_paused_sequence_reuses_its_blocks() -> None:
    scheduler = make_scheduler(blocks=6, policy=MAX_UTILIZATION, reuse=True)
    low = add(scheduler, 1, list(range(50, 58)), 8, priority=0.1)
    run_step(scheduler)
    high = add(scheduler, 2, 16, 1)
    assert paused(run_step(scheduler)) == [1]
    scheduler.remove([high])
    assert shape(run_step(scheduler)) == ([(1, 1)], []), "of 8 tokens and one generated, 8 were in the cache"
    assert low.use.reused == 2


def test_paused_beam_search_starts_again() -> None:
    scheduler = make_scheduler(blocks=7, beams=2, policy=MAX_UTILIZATION)
    add(scheduler, 1, 4, 8, width=2)
    second = add(scheduler, 2, 4, 8, width=2)
    run_step(scheduler)
    assert shape(run_step(scheduler)) == ([], [1, 2])
    for _ in range(3):
        run_step(scheduler)
    assert paused(run_step(scheduler)) == [2]
    assert second.context_left == 4


def test_sequence_waits_for_blocks_that_another_one_computes() -> None:
    scheduler = make_scheduler(reuse=True)
    add(scheduler, 1, 10)
    add(scheduler, 2, 12)
    add(scheduler, 3, [90, 91, 92, 93, 94])
    assert shape(run_step(scheduler)) == ([(1, 10), (3, 5)], [])
    assert shape(run_step(scheduler)) == ([(2, 4)], [1, 3])


def test_prompts_take_brief_steps_beside_sequences_that_decode() -> None:
    scheduler = make_scheduler(chunked=True, brief_tokens=16)
    add(scheduler, 1, 60, 100)
    assert shape(run_step(scheduler)) == ([(1, 60)], [])  # nothing waits for it
    for _ in range(300):  # since a prompt arrived
        scheduler.plan_step()
    add(scheduler, 2, 40)
    chunks = [shape(run_step(scheduler)) for _ in range(4)]
    assert chunks == [*[([(2, 12)], [1])] * 3, ([(2, 4)], [1])]


def test_prompts_take_more_of_a_step_while_many_arrive() -> None:
    scheduler = make_scheduler(blocks=2000, batch=200, tokens=1000, chunked=True, brief_tokens=16)
    add(scheduler, 1, 4, 190)
    run_step(scheduler)
    taken = 0
    for number in range(2, 102):
        add(scheduler, number, 60, 1)
        plan = run_step(scheduler)
        taken += plan.context_tokens
        scheduler.remove([each for each in scheduler.active if each.id > 1 and each.generated])
    assert taken > 0.7 * 100 * 60


def test_prompts_that_wait_are_not_forgotten() -> None:
    scheduler = make_scheduler(blocks=2000, batch=200, tokens=1000, chunked=True, brief_tokens=16)
    add(scheduler, 1, 4, 190)
    run_step(scheduler)
    for number in range(2, 150):
        add(scheduler, number, 180, 1)
    assert run_step(scheduler).context_tokens > 800


def test_a_window_gets_whole_units_in_a_brief_step() -> None:
    scheduler = make_scheduler(tokens=1000, windows=(8,), chunked=True, brief_tokens=16)
    add(scheduler, 1, 4, 50)
    run_step(scheduler)
    for _ in range(300):
        scheduler.plan_step()
    add(scheduler, 2, 190)
    assert shape(run_step(scheduler)) == ([(2, 190)], [1])


@pytest.mark.parametrize("options", [{"policy": STATIC}, {"windows": (8, 100)}, {"reuse": False}])
def test_no_waiting_where_blocks_cannot_be_shared(options: dict[str, Any]) -> None:
    scheduler = make_scheduler(**{"reuse": True, **options})
    add(scheduler, 1, 10)
    add(scheduler, 2, 12)
    assert shape(run_step(scheduler)) == ([(1, 10), (2, 12)], [])


def test_nobody_waits_for_blocks_that_are_not_kept() -> None:
    scheduler = make_scheduler(reuse=True, beams=2, tokens=16, chunked=True)
    add(scheduler, 1, 20, width=2)
    run_step(scheduler)
    add(scheduler, 2, 12, width=2)
    assert shape(run_step(scheduler)) == ([(1, 4), (2, 12)], [])


def test_a_step_is_planned_ahead_only_while_nobody_can_be_paused() -> None:
    scheduler = make_scheduler(blocks=4, policy=MAX_UTILIZATION)
    add(scheduler, 1, 4, 8)
    run_step(scheduler)
    assert scheduler.can_plan_ahead()
    waiting = add(scheduler, 2, 16, 4)
    run_step(scheduler)
    assert (waiting.slots, scheduler.cache.available) == ((), 2)
    assert not scheduler.can_plan_ahead()


def test_blocks_of_a_failed_sequence_are_not_reused() -> None:
    scheduler = make_scheduler(reuse=True)
    sequence = add(scheduler, 1, 8)
    plan = scheduler.plan_step()
    assert plan
    sequence.computed = 8
    scheduler.cache.extend(sequence.slots[0], 8)
    scheduler.remove([sequence], trusted=False)
    add(scheduler, 2, 8)
    assert shape(run_step(scheduler)) == ([(2, 8)], [])

"""Random requests under every policy: all end, budgets hold, and no block is lost."""

from __future__ import annotations

from collections import deque
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.support.schedulers import make_scheduler, make_sequence, run_step
from trtserve.executor.api import CapacitySchedulerPolicy, ContextChunkingPolicy
from trtserve.executor.engine.scheduler import Scheduler, StepPlan, insert_by_priority
from trtserve.executor.engine.sequence import Sequence

REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 24),  # tokens of the prompt
        st.integers(1, 12),  # new tokens
        st.sampled_from([0.5, 0.5, 0.5, 0.1, 0.9]),
        st.integers(0, 12),  # step at which it arrives
        st.integers(0, 3),  # draft
        st.sampled_from([None, None, None, 1, 5]),  # step after which it is cancelled
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    requests=REQUESTS,
    policy=st.sampled_from(CapacitySchedulerPolicy),
    chunking=st.sampled_from([None, *ContextChunkingPolicy]),
    width=st.sampled_from([1, 1, 2]),
    reuse=st.booleans(),
)
def test_every_request_ends_under_every_policy(
    requests: list[tuple[int, int, float, int, int, int | None]],
    policy: CapacitySchedulerPolicy,
    chunking: ContextChunkingPolicy | None,
    width: int,
    reuse: bool,
) -> None:
    """Each step stays within its budgets, some request always advances, and all blocks are freed."""
    chosen = chunking or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
    options: dict[str, Any] = {"policy": policy, "chunking": chosen, "reuse": reuse, "beams": 2}
    scheduler = make_scheduler(blocks=20, batch=3, tokens=28, chunked=chunking is not None, **options)
    coming = deque(sorted(enumerate(requests), key=lambda item: item[1][3]))
    queue: deque[Sequence] = deque()
    ends: dict[int, int | None] = {}
    for step in range(1000):
        while coming and coming[0][1][3] <= step:
            number, (prompt, new, priority, _, draft, cancelled) = coming.popleft()
            drafted = (1,) * draft if width == 1 else ()
            new = max(new, len(drafted) + 1)
            insert_by_priority(queue, make_sequence(number, prompt, new, width, priority=priority, draft=drafted))
            ends[number] = None if cancelled is None else step + cancelled
        while (sequence := scheduler.take(queue)) is not None:
            scheduler.add(sequence)
        if scheduler.active:
            plan = run_step(scheduler)
            assert plan
            _check_budgets(scheduler, plan)
        scheduler.remove([each for each in scheduler.active if _has_ended(each, ends[each.id], step)])
        if not (coming or queue or scheduler.active):
            break
    assert [*coming, *queue, *scheduler.active] == [], "not all requests have ended"
    assert scheduler.cache.available == scheduler.cache.pool.count


def _has_ended(sequence: Sequence, cancelled: int | None, step: int) -> bool:
    return len(sequence.generated) >= sequence.max_tokens or (cancelled is not None and step >= cancelled)


def _check_budgets(scheduler: Scheduler, plan: StepPlan) -> None:
    drafts = sum(len(sequence.draft) for sequence, _ in plan.chunks if sequence.generating)
    generations = sum(sequence.width for sequence in plan.generations)
    assert plan.context_tokens + drafts + generations <= scheduler.limits.max_num_tokens
    assert len(plan.chunks) + len(plan.generations) <= scheduler.limits.max_batch_size
    assert all(size > 0 for _, size in plan.chunks)
    assert not {sequence for sequence, _ in plan.chunks} & set(plan.generations)
    assert scheduler.cache.available >= 0

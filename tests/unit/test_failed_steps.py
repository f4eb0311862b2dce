"""What an executor does when steps fail: one, several in a row, for lack of memory, or because the device is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.executors import Start, answer_of, collect, executors, free_blocks
from tests.support.fake_model import FakeChoosingModel, FakeModel, greedy_continuation
from tests.support.waiting import wait_until
from trtserve.executor.api import KvCacheConfig, Request
from trtserve.executor.engine import loop, step
from trtserve.executor.engine.model import FatalModelError, StepInputs
from trtserve.executor.interface.executor import Executor

STOPPED = "The executor has stopped working: "
LOST = "AcceleratorError: CUDA error: an illegal memory access was encountered"
REUSE = KvCacheConfig(enable_block_reuse=True)


@pytest.fixture(params=[FakeModel, FakeChoosingModel], ids=["waits", "overlaps"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    with executors(request.param) as make:
        yield make


def fail_with(model: FakeModel, monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> None:
    """Let the next steps fail with `errors`; None is a step that succeeds."""
    waiting, forward = list(errors), model.forward

    def failing(step: StepInputs) -> Any:
        error = waiting.pop(0) if waiting else None
        if error is not None:
            raise error
        return forward(step)

    monkeypatch.setattr(model, "forward", failing)


def error_of(executor: Executor, prompt: int = 5) -> str:
    return str(answer_of(executor, Request([prompt], 3)).error_msg)


def assert_stopped(executor: Executor, cause: str) -> None:
    """New requests are refused at once, and nothing is left to fetch."""
    with pytest.raises(RuntimeError, match="^" + STOPPED) as refusal:
        executor.enqueue_request(Request([1], 2))
    assert str(refusal.value) == STOPPED + cause
    with pytest.raises(RuntimeError, match="^" + STOPPED):
        executor.await_responses(timeout=5.0)


def test_a_lost_device_stops_the_executor(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, model = start(batch=1)
    assert not answer_of(executor, Request([5], 3)).has_error()
    fail_with(model, monkeypatch, None, FatalModelError(LOST))
    model.gate.clear()
    ids = executor.enqueue_requests([Request([number], 6) for number in (1, 2, 3)])
    model.gate.set()
    for responses in collect(executor, ids).values():  # also those that only waited
        assert responses[-1].error_msg == STOPPED + LOST
    assert_stopped(executor, LOST)


def test_too_little_memory_ends_only_the_requests_of_its_step(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, model = start()
    fail_with(model, monkeypatch, *[MemoryError("CUDA out of memory")] * 5)
    for _ in range(5):
        assert error_of(executor).endswith("in forwardAsync function: the step failed: CUDA out of memory")
    answer = answer_of(executor, Request([5], 3))
    assert answer.result.output_token_ids == [[5, *greedy_continuation([5], 3)]]


def test_steps_that_never_have_memory_stop_the_executor(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_STEPS_WITHOUT_MEMORY", 4)
    executor, model = start()
    fail_with(model, monkeypatch, *[MemoryError("no memory")] * 4)
    errors = [error_of(executor) for _ in range(4)]
    cause = "4 steps in a row have failed, the last one with MemoryError: no memory"
    assert [error.startswith(STOPPED) for error in errors] == [False, False, False, True]
    assert_stopped(executor, cause)


def test_three_failed_steps_in_a_row_stop_the_executor(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, model = start()
    working, broken = model.forward, [ValueError("broken step")] * 100
    fail_with(model, monkeypatch, *broken)
    errors = [error_of(executor) for _ in range(2)]
    monkeypatch.setattr(model, "forward", working)
    assert not answer_of(executor, Request([5], 3)).has_error()  # the count begins anew
    fail_with(model, monkeypatch, *broken)
    errors += [error_of(executor) for _ in range(3)]
    cause = "3 steps in a row have failed, the last one with ValueError: broken step"
    assert [error.startswith(STOPPED) for error in errors] == [False, False, False, False, True]
    assert_stopped(executor, cause)


@pytest.mark.parametrize("length", [12, 70], ids=["one step", "chunks"])
def test_what_a_failed_step_should_have_written_is_not_reused(
    start: Start, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, model = start(kv_cache_config=REUSE, enable_chunked_context=True, tokens=32)
    prompt = [number % 90 for number in range(length)]
    # The blocks hold nothing (the fake model's cache is empty), as after a kernel that did not run.
    fail_with(model, monkeypatch, *[None] * (length // 32), ValueError("broken step"))
    assert "broken step" in str(answer_of(executor, Request(prompt, 4)).error_msg)
    for _ in range(2):
        answer = answer_of(executor, Request(prompt, 4))
        assert answer.result.output_token_ids == [[*prompt, *greedy_continuation(prompt, 4)]]
    assert free_blocks(executor) == model.blocks


def test_a_sequence_that_ended_before_its_last_step_failed_poisons_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with executors(FakeChoosingModel) as make:
        executor, model = make(kv_cache_config=REUSE)
        prompt = [1, 2, 3, 4, 5, 6]
        wanted = greedy_continuation(prompt, 3)
        # Its end is known when the step after it, whose key it would have written, is on its way.
        fail_with(model, monkeypatch, None, ValueError("broken step"))
        first, second = collect(
            executor, executor.enqueue_requests([Request(prompt, 3, stop_words=[[wanted[0]]]), Request([9] * 9, 3)])
        ).values()
        assert not first[-1].has_error()
        assert second[-1].has_error()
        whole = [*prompt, *wanted]
        answer = answer_of(executor, Request(whole, 3))
        assert answer.result.output_token_ids == [[*whole, *greedy_continuation(whole, 3)]]
        assert free_blocks(executor) == model.blocks


def test_blocks_that_gave_undefined_logits_are_not_reused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, model = start(kv_cache_config=REUSE)
    prompt = list(range(20))
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda step: forward(step) * float("nan"))
    assert "are not finite" in error_of_prompt(executor, prompt)
    monkeypatch.setattr(model, "forward", forward)
    before = executor._loop.cache.reused_total  # type: ignore[union-attr]
    answer = answer_of(executor, Request(prompt, 4))
    assert answer.result.output_token_ids == [[*prompt, *greedy_continuation(prompt, 4)]]
    assert executor._loop.cache.reused_total == before  # type: ignore[union-attr]
    assert free_blocks(executor) == model.blocks


def error_of_prompt(executor: Executor, prompt: list[int]) -> str:
    return str(answer_of(executor, Request(prompt, 4)).error_msg)


def test_a_device_that_does_not_answer_is_told_from_one_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    with executors(FakeChoosingModel) as make:
        executor, model = make()
        assert not answer_of(executor, Request([5], 3)).has_error()
        assert executor.hang() is None
        model.gate.clear()
        number = executor.enqueue_request(Request([5], 3))
        stepper = executor._loop._stepper  # type: ignore[union-attr]
        wait_until(lambda: stepper._awaited_since is not None)
        assert executor.hang() is None  # not yet
        monkeypatch.setattr(step, "_LONGEST_WAIT", 0.0)
        monkeypatch.setattr(stepper, "_longest_wait", 0.0)
        wait_until(lambda: executor.hang() is not None)
        assert "has not come back from its device for" in str(executor.hang())
        monkeypatch.setattr(stepper, "_longest_wait", 60.0)  # it may well take ten times as long as the slowest so far
        assert executor.hang() is None
        model.gate.set()
        assert not collect(executor, [number])[number][-1].has_error()
        assert executor.hang() is None


def test_what_the_host_computes_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_LONGEST_WAIT", 0.0)
    with executors(FakeModel) as make:
        executor, model = make()
        model.gate.clear()
        number = executor.enqueue_request(Request([5], 3))
        time.sleep(0.2)
        assert executor.hang() is None
        model.gate.set()
        collect(executor, [number])


def test_a_stopped_executor_shuts_down(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    executor, model = start()
    fail_with(model, monkeypatch, FatalModelError(LOST))
    assert error_of(executor) == STOPPED + LOST
    ending = threading.Thread(target=executor.shutdown)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()

"""Executors over fake models, and functions that wait for their responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.fake_model import FakeModel
from trtserve.executor.api import CapacitySchedulerPolicy, Executor, ExecutorConfig, Request, Response
from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.engine.loop import EngineLoop

Start = Callable[..., tuple[Executor, FakeModel]]
SOON = 60.0


@contextmanager
def executors(model_class: type[FakeModel] = FakeModel) -> Iterator[Start]:
    """Start executors with fake models; they are shut down at the end of the test."""
    started: list[tuple[Executor, FakeModel]] = []

    def make(
        *,
        batch: int = 8,
        seq_len: int = 100,
        tokens: int = 64,
        built: dict[str, Any] | None = None,
        lora: Any = None,
        config_class: type[ExecutorConfig] = ExecutorConfig,
        **config: Any,
    ) -> tuple[Executor, FakeModel]:
        """Start an executor; `built` are fields of EngineLimits, `lora` the shape of adapters."""
        model = model_class()
        model.lora = lora
        settings = config_class(**config)
        policy = settings.scheduler_config.capacity_scheduler_policy
        limits = EngineLimits(
            max_batch_size=batch,
            max_seq_len=seq_len,
            max_num_tokens=tokens,
            max_beam_width=settings.max_beam_width,
            vocab_size=model.vocab_size,
            chunked=settings.enable_chunked_context,
            pauses=policy is CapacitySchedulerPolicy.MAX_UTILIZATION,
            **(built or {}),
        )
        started.append((Executor.from_model(model, limits, settings), model))
        return started[-1]

    yield make
    for executor, model in started:
        model.gate.set()
        executor.shutdown()


def collect(executor: Executor, ids: list[int]) -> dict[int, list[Response]]:
    """Return all responses of `ids`, up to the last of each."""
    found: dict[int, list[Response]] = {number: [] for number in ids}
    deadline = time.monotonic() + SOON
    while not all(responses and is_last(responses[-1]) for responses in found.values()):
        assert time.monotonic() < deadline, "not all requests were answered"
        for response in executor.await_responses(timeout=0.5):
            assert isinstance(response, Response)
            found[response.request_id].append(response)
    return found


def is_last(response: Response) -> bool:
    """True for the response that ends its request."""
    return response.has_error() or response.result.is_final


def answer_of(executor: Executor, request: Request) -> Response:
    """Return the only response of a request."""
    (response,) = collect(executor, [executor.enqueue_request(request)]).popitem()[1]
    return response


def loop_of(executor: Executor) -> EngineLoop:
    """Return the loop of an executor that has not been shut down."""
    assert isinstance(executor._loop, EngineLoop)
    return executor._loop


def free_blocks(executor: Executor) -> int:
    """Return the number of blocks that no sequence has or has reserved."""
    assert executor._loop is not None
    return loop_of(executor).cache.available


def pauses(executor: Executor) -> int:
    """Return how often a request was paused, from the iteration records since the last call."""
    batches = [record.inflight_batching_stats for record in executor.get_latest_iteration_stats()]
    return sum(batch.num_paused_requests for batch in batches if batch is not None)

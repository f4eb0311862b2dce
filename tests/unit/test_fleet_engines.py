"""The fleet simulation against real engines in virtual time: their scheduler, batches and cache, and the balancer.

The model of each engine holds every step until the test says that its time has come. Nothing depends on the machine.
"""

from __future__ import annotations

import heapq
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.executors import executors
from tests.support.fake_model import VOCAB, FakeModel
from trtserve.bench.statistics import percentile
from trtserve.executor.api import Executor, KvCacheConfig, Request
from trtserve.executor.engine.model import StepInputs
from trtserve.gateway.balancing import Balancer, RequestShare
from trtserve.pipeline.fleet.simulation import Arrivals, ReplicaSpeed, Simulation

SPEED = ReplicaSpeed(step=0.04, sequence=0.002, prompt_token=0.0002, request=0.0, slots=8)
PROMPT, ANSWER, REQUESTS = 60, 16, 300


class HeldModel(FakeModel):
    """Reports each step, and computes it when it may."""

    def __init__(self) -> None:
        super().__init__(tokens_per_block=32)
        self.begun: queue.SimpleQueue[tuple[list[int], int]] = queue.SimpleQueue()
        """Of each step the requests whose prompts it has, and its number of sequences."""
        self.may_end = threading.Semaphore(0)

    def forward(self, step: StepInputs) -> Any:
        firsts = step.subsequence_begins[:-1][step.past_lens == 0]
        new = [int(step.token_ids[at]) * VOCAB + int(step.token_ids[at + 1]) for at in firsts]
        self.begun.put((new, len(step.past_lens)))
        assert self.may_end.acquire(timeout=60)
        return super().forward(step)


@dataclass
class VirtualReplica:
    """An engine whose steps end at moments of virtual time."""

    executor: Executor
    model: HeldModel
    left: dict[int, int] = field(default_factory=dict)
    """Request → tokens that it still gets."""
    step: list[int] = field(default_factory=list)
    """Requests in the step that runs."""
    busy: bool = False

    def begin(self, now: float) -> float:
        """Wait until the engine has begun a step, and return when it ends."""
        new, count = self.model.begun.get(timeout=60)
        self.step = [request for request, tokens in self.left.items() if tokens < ANSWER] + new
        assert len(self.step) == count
        self.busy = True
        return now + SPEED.step + SPEED.sequence * count + SPEED.prompt_token * PROMPT * len(new)


def served(replicas: list[VirtualReplica], moments: list[float]) -> list[float]:
    """Return the virtual seconds to the first token of each request, shortest first."""
    balancer, shares = Balancer(len(replicas)), dict[int, RequestShare]()
    random, firsts = np.random.default_rng(1), dict[int, float]()
    # An arrival is before the end of a step at the same moment.
    events = [(moment, 0, number) for number, moment in enumerate(moments)]
    heapq.heapify(events)
    while events:
        now, is_step, number = heapq.heappop(events)
        if is_step:
            replica = replicas[number]
            for request in replica.step:
                firsts.setdefault(request, now - moments[request])
                replica.left[request] -= 1
                if not replica.left[request]:
                    del replica.left[request]
                    balancer.end(shares[request])
            replica.busy = False
            replica.model.may_end.release()
        else:
            prompt = [*divmod(number, VOCAB), *random.integers(0, VOCAB, PROMPT - 2).tolist()]
            shares[number] = balancer.choose(prompt)
            replica = replicas[shares[number].replica]
            replica.left[number] = ANSWER
            replica.executor.enqueue_request(Request(prompt, ANSWER))
        if replica.left and not replica.busy:
            heapq.heappush(events, (replica.begin(now), 1, replicas.index(replica)))
    return sorted(firsts.values())


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_simulation_agrees_with_real_engines(count: int) -> None:
    random = np.random.default_rng(count)
    # Bursts: quiet and busy times in turns.
    rates = count * np.where(np.arange(REQUESTS) // (20 * count) % 2, 7.5, 3.0)
    moments = np.cumsum(random.exponential(1, REQUESTS) / rates)
    with executors(HeldModel) as start:
        replicas = []
        for _ in range(count):
            cache = KvCacheConfig(enable_block_reuse=False)
            executor, model = start(batch=SPEED.slots, seq_len=PROMPT + ANSWER, tokens=2048, kv_cache_config=cache)
            assert isinstance(model, HeldModel)
            replicas.append(VirtualReplica(executor, model))
        measured = served(replicas, moments.tolist())
    ones = np.ones(REQUESTS)
    found = Simulation(count, SPEED).run([Arrivals(moments, PROMPT * ones, ANSWER * ones, 0 * ones)])
    figures = {quantile: (found.first.quantile(quantile), percentile(measured, quantile)) for quantile in (0.5, 0.99)}
    for simulated, real in figures.values():
        assert simulated == pytest.approx(real, rel=0.15)

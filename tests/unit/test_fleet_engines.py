"""The fleet simulation against real engines in virtual time: their scheduler, batches and cache, and the balancer.

Nothing depends on the machine.
"""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from tests.support.executors import executors
from tests.support.fake_model import VOCAB
from tests.support.virtual_replicas import ANSWER, PROMPT, SPEED, HeldModel, VirtualReplica
from trtserve.bench.statistics import percentile
from trtserve.executor.api import KvCacheConfig, Request
from trtserve.gateway.balancing import Balancer, RequestShare
from trtserve.pipeline.fleet.simulation import Arrivals, Simulation

REQUESTS = 300


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

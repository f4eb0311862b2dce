"""Requests find the copy of a server that has their prefix, and no copy gets much more to do than the others."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.scripted_endpoint import complete, endpoint_of, error, events, write_chat_model
from tests.support.scripted_triton import ScriptedTriton
from trtserve.errors import ServerUnreachableError
from trtserve.gateway.balancing import BLOCK, Balancer
from trtserve.gateway.openai import served

SPEED = 4000.0
"""Tokens that a simulated replica works on in a second."""


@dataclass
class Simulation:
    """Conversations in virtual time on replicas with real prefix caches, which work on one request after the other."""

    replicas: int
    conversations: int
    turns: int
    cached_blocks: int
    hits: int = 0
    possible: int = 0
    work: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def run(self, choose: Callable[[Sequence[int]], Any], end: Callable[[Any], None], clock: list[float]) -> None:
        """Run it. `choose` returns an object with the attribute `replica`, `end` gets it back."""
        chance = random.Random(1)
        system = [chance.randrange(30_000) for _ in range(256)]
        said = [list(system) for _ in range(self.conversations)]
        caches: list[OrderedDict[tuple[int, int], None]] = [OrderedDict() for _ in range(self.replicas)]
        everything: set[tuple[int, int]] = set()
        free, self.work = [0.0] * self.replicas, [0.0] * self.replicas
        queue: list[tuple[float, int, int, Any]] = [
            (chance.random() * self.conversations / (self.replicas * 3), number, number, None)
            for number in range(self.conversations)
        ]
        heapq.heapify(queue)
        left, number = [self.turns] * self.conversations, self.conversations
        while queue:
            clock[0], _, each, running = heapq.heappop(queue)
            number += 1
            if running is not None:
                end(running)
                if left[each]:
                    heapq.heappush(queue, (clock[0] + chance.expovariate(1 / 3), number, each, None))
                continue
            left[each] -= 1
            said[each] += [chance.randrange(30_000) for _ in range(chance.randrange(40, 400))]
            share = choose(said[each])
            blocks = _prefixes(said[each])
            cache, replica = caches[share.replica], share.replica
            found = next((depth for depth, block in enumerate(blocks) if block not in cache), len(blocks))
            self.possible += next((depth for depth, block in enumerate(blocks) if block not in everything), len(blocks))
            self.hits += found
            everything.update(blocks)
            for block in reversed(blocks):
                cache[block] = None
                cache.move_to_end(block)
            while len(cache) > self.cached_blocks:
                cache.popitem(last=False)
            answer = chance.randrange(20, 200)
            tokens = len(said[each]) - found * BLOCK + answer
            said[each] += [chance.randrange(30_000) for _ in range(answer)]
            begun = max(clock[0], free[replica])
            self.waits.append(begun + (tokens - answer) / SPEED - clock[0])
            free[replica] = begun + tokens / SPEED
            self.work[replica] += tokens
            heapq.heappush(queue, (free[replica], number, each, share))

    @property
    def late(self) -> float:
        """Seconds to the first token that one in a hundred waits longer for."""
        return sorted(self.waits)[len(self.waits) * 99 // 100]

    @property
    def uneven(self) -> float:
        """Work of the busiest replica, compared with the mean."""
        return max(self.work) / (sum(self.work) / len(self.work))


def _prefixes(ids: Sequence[int]) -> list[tuple[int, int]]:
    chain, found = 0, []
    for at in range(0, len(ids) // BLOCK * BLOCK, BLOCK):
        chain = hash((chain, *ids[at : at + BLOCK]))
        found.append((at, chain))
    return found


@dataclass
class Place:
    replica: int


def test_prefixes_are_found_and_the_load_is_even() -> None:
    ours, clock = Simulation(8, 100, 8, 4000), [0.0]
    balancer = Balancer(8, clock=lambda: clock[0])
    ours.run(balancer.choose, balancer.end, clock)
    open_requests, other = [0] * 8, Simulation(8, 100, 8, 4000)

    def least(_: Sequence[int]) -> Place:
        replica = min(range(8), key=open_requests.__getitem__)
        open_requests[replica] += 1
        return Place(replica)

    def done(place: Place) -> None:
        open_requests[place.replica] -= 1

    other.run(least, done, [0.0])
    assert ours.hits > 0.9 * ours.possible > 1.5 * other.hits
    assert ours.late < 0.6 * other.late
    assert ours.uneven < 1.3
    assert balancer.loads == pytest.approx([0.0] * 8, abs=1e-6)


def test_a_thousand_replicas() -> None:
    ours, clock = Simulation(1000, 1500, 4, 400), [0.0]
    balancer = Balancer(1000, clock=lambda: clock[0])
    ours.run(balancer.choose, balancer.end, clock)
    assert ours.hits > 0.9 * ours.possible


def test_the_memory_is_bounded() -> None:
    balancer = Balancer(4, remembered=100)
    for number in range(50):
        balancer.end(balancer.choose([number] * BLOCK * 20))
    assert len(balancer._places) == 100


def test_a_busy_replica_shares_its_prefix() -> None:
    balancer, prompt = Balancer(3), [7] * BLOCK * 4
    first = balancer.choose(prompt)
    balancer.end(first)
    again = balancer.choose(prompt)
    assert (again.replica, again.cached) == (first.replica, len(prompt) - 1)
    chosen = {balancer.choose(prompt).replica for _ in range(20)}
    assert chosen == {0, 1, 2}


def test_a_replica_that_failed_is_left_alone() -> None:
    now = [0.0]
    balancer, prompt = Balancer(2, clock=lambda: now[0]), [7] * BLOCK * 4
    first = balancer.choose(prompt)
    balancer.end(first)
    balancer.failed(first.replica)
    other = balancer.choose(prompt)
    assert (other.replica, other.cached) == (1 - first.replica, 0)
    assert balancer.choose(prompt, without=[other.replica]).replica in (0, 1)  # all are out: any is tried
    balancer.answered(first.replica)
    assert {balancer.choose([each] * 9).replica for each in range(20)} == {0, 1}


@pytest.fixture
def servers(tmp_path: Path) -> list[ScriptedTriton]:
    folder = write_chat_model(tmp_path / "model")
    first, second = ScriptedTriton(folder), ScriptedTriton(folder)
    first.__dict__["clients"] = (first, second)  # instead of connections
    return [first, second]


@pytest.fixture
def client(servers: list[ScriptedTriton], monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    async def no_watch(*_: Any) -> None:
        """Nothing to ask: the tests say who fails."""

    monkeypatch.setattr(ScriptedTriton, "_watch", no_watch)
    with endpoint_of(servers[0]) as client:
        yield client


def test_servers_are_asked_whether_they_are_ready(
    servers: list[ScriptedTriton], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "_PROBE_PAUSE", 0.001)
    answers: list[list[str] | Exception] = [["tensorrt_llm"], [], ["tensorrt_llm"], ServerUnreachableError("gone")]
    states: list[bool] = []

    async def model_names(_: ScriptedTriton) -> list[str]:
        states.append(bool(servers[0].balancer._until[1]))
        if len(states) > len(answers):
            raise asyncio.CancelledError
        answer = answers[len(states) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ScriptedTriton, "model_names", model_names, raising=False)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(servers[0]._watch(1))
    assert states == [False, False, True, False, True]  # whether it was left alone, before each question


def test_both_servers_answer(client: TestClient, servers: list[ScriptedTriton]) -> None:
    for number in range(6):
        assert complete(client, prompt=f"{number}").json()["choices"][0]["text"] == "Hello"
    assert all(server.requests for server in servers)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_moves_on_before_its_first_byte(
    client: TestClient, servers: list[ScriptedTriton], stream: bool
) -> None:
    servers[0].script = (ServerUnreachableError("gone"),)
    for _ in range(3):
        answer = complete(client, stream=stream)
        assert answer.status_code == 200
        assert "Hello" in "".join(each["choices"][0]["text"] for each in events(answer)) if stream else answer.json()
    assert len(servers[0].requests) <= 1
    servers[1].script = servers[0].script
    assert error(complete(client, stream=stream))[:2] == (503, "gone")


def test_an_answer_that_has_begun_does_not_move(client: TestClient, servers: list[ScriptedTriton]) -> None:
    for server in servers:
        server.script = ("He", ServerUnreachableError("gone"))
    found = events(complete(client, stream=True))
    assert "".join(each["choices"][0]["text"] for each in found[:-1]) == "He"
    assert found[-1]["error"]["message"] == "gone"
    assert len(servers[0].requests) + len(servers[1].requests) == 1

"""Requests find the copy of a server that has their prefix, and no copy gets much more to do than the others."""

from __future__ import annotations

import asyncio
import heapq
import io
import itertools
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest
from fastapi.testclient import TestClient

from tests.support.gateways import settings_of
from tests.support.scripted_endpoint import complete, endpoint_of, error, events, write_chat_model
from tests.support.scripted_triton import ScriptedTriton
from trtserve.cli.gateway import _Front, _running
from trtserve.client.endpoint import Endpoint, refused
from trtserve.errors import RequestError, ServerUnreachableError, TrtserveError, UsageError
from trtserve.gateway import replicas
from trtserve.gateway.app import Gateway
from trtserve.gateway.balancing import BLOCK, Balancer, BalancerMemory, RequestShare
from trtserve.gateway.openai import served
from trtserve.gateway.openai.served import Backend
from trtserve.gateway.replicas import Replica, ReplicaAddress, Replicas, SharedState
from trtserve.gateway.settings import write_private
from trtserve.gateway.triton import TritonHttp

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
    ours, clock = Simulation(8, 200, 8, 8000), [0.0]
    balancer = Balancer(8, clock=lambda: clock[0])
    ours.run(balancer.choose, balancer.end, clock)
    open_requests, other = [0] * 8, Simulation(8, 200, 8, 8000)
    in_turn, turns = Simulation(8, 200, 8, 8000), itertools.count()

    def least(_: Sequence[int]) -> Place:
        replica = min(range(8), key=open_requests.__getitem__)
        open_requests[replica] += 1
        return Place(replica)

    def done(place: Place) -> None:
        open_requests[place.replica] -= 1

    other.run(least, done, [0.0])
    in_turn.run(lambda _: Place(next(turns) % 8), lambda _: None, [0.0])
    assert ours.hits > 0.9 * ours.possible > 1.5 * other.hits
    assert ours.hits > 1.5 * in_turn.hits
    assert ours.late < 0.6 * min(other.late, in_turn.late)
    assert ours.uneven < 1.3
    assert balancer.loads == pytest.approx([0.0] * 8, abs=1e-6)


def test_a_thousand_replicas() -> None:
    ours, clock = Simulation(1000, 1500, 4, 400), [0.0]
    balancer = Balancer(1000, clock=lambda: clock[0])
    ours.run(balancer.choose, balancer.end, clock)
    assert ours.hits > 0.9 * ours.possible


def test_the_memory_is_bounded() -> None:
    memory = BalancerMemory(remembered=128)
    balancer = Balancer(4, memory=memory)
    for number in range(50):
        balancer.end(balancer.choose([number] * BLOCK * 20))
    assert (memory.keys != 0).sum() <= len(memory.keys) == 128
    assert balancer.choose([49] * BLOCK * 20).cached > BLOCK * 10  # the latest are there
    assert balancer.choose([0] * BLOCK * 20).cached == 0


def test_processes_share_what_they_remember_and_do() -> None:
    memory, prompt = BalancerMemory(processes=2, remembered=128), np.arange(BLOCK * 4)
    one = Balancer(3, memory=memory)
    two = Balancer(3, memory=memory, process=1, clock=lambda: 0.0)
    first = one.choose(prompt)
    assert two.choose(prompt).replica == first.replica
    assert two.loads == one.loads
    assert sum(load > 0 for load in two.loads) == 1
    assert {two.choose([each]).replica for each in range(2)} == {0, 1, 2} - {first.replica}


def test_closed_replicas_get_nothing() -> None:
    balancer = Balancer(3)
    balancer.closed = {0, 2}
    assert {balancer.choose([each]).replica for each in range(9)} == {1}
    balancer.failed(1)
    assert balancer.choose([1]).replica == 1  # it failed, and the others are closed
    balancer.closed = {0, 1, 2}
    with pytest.raises(ServerUnreachableError, match="drained"):
        balancer.choose([1])


def test_twenty_thousand_requests_a_second_on_two_hundred_replicas() -> None:
    """A second of virtual time: 4,000 conversations that begin with 600 tokens and get 100 more with each turn."""
    chance, balancer, now = np.random.default_rng(1), Balancer(200), 0.0
    running: list[tuple[float, int, RequestShare]] = []
    texts: dict[int, np.ndarray[Any, Any]] = {}
    work, found, possible = np.zeros(200), 0, 0
    for number in range(20_000):
        now = number / 20_000
        while running and running[0][0] <= now:
            balancer.end(heapq.heappop(running)[2])
        each = int(chance.integers(4_000))
        before = texts.get(each)
        said = chance.integers(0, 30_000, 600 if before is None else 100, dtype=np.int32)
        texts[each] = text = said if before is None else np.concatenate([before, said])
        share = balancer.choose(text)
        found += share.cached
        possible += 0 if before is None else len(before) // BLOCK * BLOCK
        work[share.replica] += share.cost
        heapq.heappush(running, (now + share.cost / 40_000, number, share))
    assert found > 0.97 * possible
    assert work.max() < 1.3 * work.mean()


def test_a_busy_replica_shares_its_prefix() -> None:
    balancer, prompt = Balancer(3), [7] * BLOCK * 4
    first = balancer.choose(prompt)
    balancer.end(first)
    again = balancer.choose(prompt)
    assert (again.replica, again.cached) == (first.replica, len(prompt) - 1)
    chosen = {balancer.choose(prompt).replica for _ in range(20)}
    assert chosen == {0, 1, 2}


def test_what_replicas_did_does_not_count_as_their_load() -> None:
    balancer, long = Balancer(2), np.zeros(1_000_000, dtype=np.int32)
    for _ in range(1000):
        balancer.end(balancer.choose(long))
    balancer.count = 3
    shares = [balancer.choose(prompt) for prompt in np.arange(3 * 64, dtype=np.int32).reshape(3, 64)]
    assert {share.replica for share in shares} == {0, 1, 2}


def test_a_replica_that_failed_is_left_alone() -> None:
    now = [0.0]
    balancer, prompt = Balancer(2, clock=lambda: now[0]), [7] * BLOCK * 4
    first = balancer.choose(prompt)
    balancer.end(first)
    balancer.failed(first.replica)
    other = balancer.choose(prompt)
    assert (other.replica, other.cached) == (1 - first.replica, 0)
    assert balancer.choose(prompt, without=[other.replica]).replica == first.replica  # the other one was tried
    with pytest.raises(ServerUnreachableError, match="can take this request"):
        balancer.choose(prompt, without=[0, 1])
    balancer.answered(first.replica)
    assert {balancer.choose([each] * 9).replica for each in range(20)} == {0, 1}


@pytest.fixture
def servers(tmp_path: Path) -> list[ScriptedTriton]:
    """Two servers; the first one is asked, and has both as replicas."""
    folder = write_chat_model(tmp_path / "model")
    first, second = ScriptedTriton(folder), ScriptedTriton(folder)
    first.replicas = Replicas(Endpoint(), [ReplicaAddress(host="second", grpc_port=1)])
    for replica, server in zip(first.replicas._all.values(), (first, second), strict=True):
        replica.__dict__["client"] = server
    return [first, second]


@pytest.fixture
def client(servers: list[ScriptedTriton], monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    async def no_watch(*_: Any) -> None:
        """Nothing to ask: the tests say who fails."""

    monkeypatch.setattr(Replicas, "watch", no_watch)
    with endpoint_of(servers[0]) as client:
        yield client


def test_servers_are_asked_whether_they_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_PROBE_PAUSE", 0.0)
    answers: list[list[str] | Exception] = [["tensorrt_llm"], [], ["tensorrt_llm"], ServerUnreachableError("gone")]

    class Answering:
        async def model_names(self) -> list[str]:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    async def look() -> list[tuple[str, bool]]:
        both = Replicas(Endpoint(), [ReplicaAddress(host="second", grpc_port=1)])
        second, found = both._all[1], list[tuple[str, bool]]()
        second.__dict__["client"] = Answering()
        while answers:
            await both._probe(second, {"tensorrt_llm"})
            chosen = {both.balancer.choose([each]).replica for each in range(19)}
            found.append((both.state(second), 1 in chosen))
        return found

    assert asyncio.run(look()) == [("ready", True), ("down", False), ("ready", True), ("down", False)]


@pytest.mark.parametrize(("streams", "state"), [(True, "ready"), (False, "down")])
def test_a_server_that_is_too_busy_to_say_that_it_is_ready_is_not_lost_while_its_answers_go_on(
    streams: bool, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_PROBE_PAUSE", 0.0)
    monkeypatch.setattr(replicas, "_PROBE_SECONDS", 0.01)
    both = Replicas(Endpoint(), [ReplicaAddress(host="second", grpc_port=1)], shared=SharedState(2))
    second = both._all[1]

    class Busy:
        async def model_names(self) -> None:
            if streams:
                second.hear()
            await asyncio.Event().wait()

    second.__dict__["client"] = Busy()
    asyncio.run(both._probe(second, {"tensorrt_llm"}))
    assert both.state(second) == state


def test_replicas_are_drained_added_and_removed_by_all_processes(tmp_path: Path) -> None:
    shared = SharedState(2, tmp_path)
    one, two = (Replicas(Endpoint(), shared=shared, process=process) for process in range(2))

    def states() -> dict[str, str]:
        for each in (one, two):
            each.apply()
        assert one.listed() == two.listed()
        return {each["address"]: each["state"] for each in one.listed()}

    first = "127.0.0.1:8001"
    assert states() == {first: "ready"}
    one.change("add", "other:1:2")
    assert states() == {first: "ready", "other:1": "ready"}
    two.change("drain", first)
    assert states() == {first: "drained", "other:1": "ready"}
    assert {each.balancer.choose([1]).replica for each in (one, two) for _ in range(5)} == {1}
    two.change("resume", first)
    one.change("remove", "other:1")
    assert states() == {first: "ready"}
    one.change("add", "third:7")
    assert states() == {first: "ready", "third:7": "ready"}
    assert (shared.folder / "replicas.json").stat().st_mode & 0o077 == 0
    actions: tuple[tuple[Any, str, str], ...] = (
        ("add", "third:7", "is a replica already"),
        ("drain", "nobody:1", f"is not a replica of this gateway; it has {first}, third:7"),
        ("add", "x/../y:1", "expected HOST:PORT"),
        ("add", "x:99999", "expected HOST:PORT"),
    )
    for action, address, message in actions:
        with pytest.raises(UsageError, match=message):
            one.change(action, address)
    one.change("remove", "third:7")
    with pytest.raises(UsageError, match="is the only replica"):
        two.change("remove", first)


def test_a_change_within_one_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    one = Replicas(Endpoint(), shared=SharedState(2, tmp_path))
    for address in ("other:1", "third:1"):
        one.change("add", address)
        os.utime(one._file, ns=(0, 0))
        one.apply()
    assert [each["address"] for each in one.listed()] == ["127.0.0.1:8001", "other:1", "third:1"]


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b"", b'{"address": NaN}', b'{"address": 1e999}', b'{"address": {"a": []}}', b"["]
)
@pytest.mark.parametrize("action", ["add", "nothing"])
def test_a_change_that_is_none_is_refused(tmp_path: Path, action: str, body: bytes) -> None:
    write_private(tmp_path / "key", "k" * 16)
    gateway = _gateway(admin_key_file=tmp_path / "key")
    headers = {"authorization": f"Bearer {'k' * 16}", "content-type": "application/json"}
    with TestClient(gateway, base_url="http://localhost") as client:
        answer = client.post(f"/replicas/{action}", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_a_refusal_ends_with_one_full_stop() -> None:
    content = io.BytesIO(b'{"error": "x:1 is not a replica of this gateway; it has y:1."}')
    connection = SimpleNamespace(
        request=lambda *_: None, getresponse=lambda: SimpleNamespace(status=400, read=content.read)
    )
    with pytest.raises(RequestError, match=r"refuses it: x:1 is not a replica of this gateway; it has y:1\.$"):
        _Front(cast("Any", connection), "key").ask("GET", "/replicas")


def test_a_request_leaves_a_server_that_stops_answering_before_it_has_begun() -> None:
    asked: list[int] = []

    async def attempt(replica: Replica) -> int:
        asked.append(replica.number)
        if len(asked) == 1:
            asyncio.get_running_loop().call_soon(replica.lost.set)
            await asyncio.Event().wait()
        return replica.number

    async def run(*, begun: bool) -> int:
        asked.clear()
        both = Replicas(Endpoint(), [ReplicaAddress(host="second", grpc_port=1)])
        try:
            return await both.send(attempt, begun=lambda: begun)
        finally:
            assert both.balancer.loads == pytest.approx([0.0, 0.0], abs=1e-6)

    assert asyncio.run(run(begun=False)) == asked[1] != asked[0]
    with pytest.raises(ServerUnreachableError, match="in the middle of an answer"):
        asyncio.run(run(begun=True))


def test_a_request_is_tried_on_three_servers_that_are_open_and_on_each_once() -> None:
    asked: list[int] = []

    async def attempt(replica: Replica) -> None:
        asked.append(replica.number)
        raise ServerUnreachableError("gone")

    def send(*, drained: int, needs_http: bool = False) -> list[int]:
        asked.clear()
        more = [ReplicaAddress(host="other", grpc_port=port, drained=port > 8 - drained) for port in range(2, 9)]
        with pytest.raises(ServerUnreachableError, match="can take this request" if needs_http else "gone"):
            asyncio.run(Replicas(Endpoint(), more).send(attempt, needs_http=needs_http))
        return asked

    assert len(set(send(drained=0))) == len(asked) == 3
    assert send(drained=7) == [0]
    assert send(drained=0, needs_http=True) == []


def _gateway(**settings: Any) -> Gateway:
    """Return a gateway in front of servers that do not answer."""
    return Gateway(settings_of(triton_grpc="127.0.0.1:8001", **settings))


def test_a_server_that_is_removed_can_be_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_PROBE_PAUSE", 0.0)

    async def run() -> None:
        behind = _gateway(replicas=("127.0.0.1:8004",))._replicas
        first, again = behind.first, behind._http(behind.first.address)
        assert first.http is again is not None
        assert not await again.is_ready()  # opens the session
        await first.close()
        assert not await again.is_ready()  # and not "Session is closed"

        async def broken(*_: Any) -> bool:
            raise RuntimeError("Session is closed")

        monkeypatch.setattr(replicas, "_says_ready", broken)
        await behind._probe(first, ())
        assert behind.state(first) == "down"
        await behind.close()

    asyncio.run(run())


def test_the_pages_of_a_gateway_whose_first_server_was_removed(tmp_path: Path) -> None:
    write_private(tmp_path / "key", "k" * 16)
    gateway = _gateway(replicas=("127.0.0.1:2:3", "127.0.0.1:4"), admin_key_file=tmp_path / "key")
    with TestClient(gateway, base_url="http://localhost") as client:
        actions: tuple[Literal["drain", "remove"], ...] = ("drain", "remove")
        for action in actions:
            assert client.get("/v2/models/m").status_code == 503
            gateway._replicas.change(action, "127.0.0.1:8001")
            gateway._replicas.apply()
        gateway._replicas.change("drain", "127.0.0.1:2")
        gateway._replicas.apply()
        answer = client.get("/v2/models/m")
        assert answer.status_code == 503
        assert answer.json()["error"] == "No copy of the server that is open can take this request."
        metrics = client.get("/metrics")
        assert metrics.status_code == 200
        assert 'trtserve_replica_ready{replica="127.0.0.1:4"}' in metrics.text


def test_what_the_cache_of_a_copy_had_is_forgotten_when_it_was_down() -> None:
    both, ids = Replicas(Endpoint(), [ReplicaAddress(host="second", grpc_port=1)]), list(range(4 * BLOCK))
    had = both.balancer.choose(ids)
    both.balancer.end(had)
    again = both.balancer.choose(ids)
    both.balancer.end(again)
    assert (again.replica, again.cached > 0) == (had.replica, True)
    for down in (True, False):
        both._note(both._all[had.replica], down=down)
    assert both.balancer.choose(ids).cached == 0


def test_a_server_that_answers_is_asked_whether_a_model_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    async def is_ready(triton: TritonHttp, _: str = "") -> bool:
        asked.append(triton._address)
        return triton._address == "127.0.0.1:3"

    async def no_watch(*_: Any) -> None:
        """The test says who is lost."""

    gateway = _gateway(replicas=("127.0.0.1:2:3",))
    monkeypatch.setattr(TritonHttp, "is_ready", is_ready)
    monkeypatch.setattr(Replicas, "watch", no_watch)
    with TestClient(gateway, base_url="http://localhost") as client:
        gateway._replicas.first.lost.set()
        assert client.get("/v2/models/m/ready").status_code == 200
    assert asked == ["127.0.0.1:3"]


def test_the_models_are_described_by_a_copy_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, watched = list[int](), asyncio.Event()

    def describe(endpoint: Endpoint, _: object) -> tuple[Any, ...]:
        asked.append(endpoint.grpc_port)
        if len(asked) == 1:
            raise ValueError("lora.json is broken")
        if endpoint.grpc_port == 8001:
            raise ServerUnreachableError("gone")
        return (SimpleNamespace(model=SimpleNamespace(name="m"), encoder=None),)

    async def watch(_self: Replicas, needed: set[str]) -> None:
        assert not needed  # it begins before the models are known
        while needed != {"m"}:
            await asyncio.sleep(0.01)
        watched.set()

    monkeypatch.setattr(served, "_describe_all", describe)
    monkeypatch.setattr(served, "_RETRY", 0.01)
    monkeypatch.setattr(Replicas, "watch", watch)
    both = Replicas(Endpoint(), [ReplicaAddress(host="second", grpc_port=1)])
    asyncio.run(asyncio.wait_for(Backend(Endpoint(), replicas=both).prepare(), 60))
    assert watched.is_set()
    assert asked == [8001, 8001, 1]


@pytest.mark.parametrize("address", ["[::1]:8001", "[::1]:8001:8000", "host:8001:8000", "host:8001"])
def test_the_command_waits_for_the_requests_of_a_drained_replica(address: str) -> None:
    name = "[::1]:8001" if "::" in address else "host:8001"
    assert _running([{"address": "other:1", "running": 1}, {"address": name, "running": 3}], address) == 3
    first = Replicas(Endpoint(host="::1")).first
    assert (first.address.name, first.endpoint.host) == ("[::1]:8001", "::1")


def test_both_servers_answer(client: TestClient, servers: list[ScriptedTriton]) -> None:
    for number in range(6):
        assert complete(client, prompt=f"{number}").json()["choices"][0]["text"] == "Hello"
    assert all(server.requests for server in servers)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("failure", [ServerUnreachableError("gone"), refused("Server is stopping")])
def test_a_request_moves_on_before_its_first_byte(
    client: TestClient, servers: list[ScriptedTriton], stream: bool, failure: TrtserveError
) -> None:
    servers[0].script = (failure,)
    for _ in range(3):
        answer = complete(client, stream=stream)
        assert answer.status_code == 200
        assert "Hello" in "".join(each["choices"][0]["text"] for each in events(answer)) if stream else answer.json()
    assert len(servers[0].requests) <= 1
    servers[1].script = servers[0].script
    assert error(complete(client, stream=stream))[:2] == (503, failure.message)


def test_words_of_a_request_do_not_close_a_server(client: TestClient, servers: list[ScriptedTriton]) -> None:
    for server in servers:
        server.script = (refused("The guide is invalid: '#/Server is stopping' in 'the server is not ready'"),)
    assert error(complete(client))[0] == 400
    assert len(servers[0].requests) + len(servers[1].requests) == 1


def test_an_answer_that_has_begun_does_not_move(client: TestClient, servers: list[ScriptedTriton]) -> None:
    for server in servers:
        server.script = ("He", ServerUnreachableError("gone"))
    found = events(complete(client, stream=True))
    assert "".join(each["choices"][0]["text"] for each in found[:-1]) == "He"
    assert found[-1]["error"]["message"] == "gone"
    assert len(servers[0].requests) + len(servers[1].requests) == 1

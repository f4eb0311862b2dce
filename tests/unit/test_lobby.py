"""Connections wait in the lobby until their request is there; those without the key wait for their turn too."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from tests.support.gateways import settings_of
from trtserve.gateway.admission import Access
from trtserve.gateway.listener import _BoundedProtocol
from trtserve.gateway.lobby import GivesWay, Lobby
from trtserve.gateway.settings import RequestLimits

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
KEY = HEAD + b"authorization: BEARER the-key\r\n\r\n{"


class Entry:
    """A lobby behind a socket, on a clock of its own, and what it lets begin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
        self.now = 100.0
        monkeypatch.setattr("trtserve.gateway.lobby.time.monotonic", lambda: self.now)
        self.stack = ExitStack()
        self.listening = self.stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=256))
        self.listening.setblocking(False)
        self.begun: list[bytes] = []
        self.giving_way: dict[GivesWay, None] = {}
        self.lobby = Lobby(
            replace(RequestLimits(), **limits),
            self.giving_way,
            lambda: 0,
            Access("the-key", loopback=True).knows,
            self._begin,
            encrypted=False,
        )

    def _begin(self, client: socket.socket, content: bytes) -> None:
        self.begun.append(content)
        client.close()

    def connect(self, content: bytes = b"") -> socket.socket:
        client = self.stack.enter_context(socket.create_connection(self.listening.getsockname(), timeout=60))
        client.sendall(content)
        return client

    async def accept_until(self, reached: Callable[[], bool]) -> None:
        """Accept what has come, while the clock stands still."""
        for _ in range(100_000):
            if reached():
                return
            self.lobby.accept(self.listening)
            await asyncio.sleep(0)
        raise AssertionError("what has come was not accepted")

    async def until(self, reached: Callable[[], bool]) -> None:
        """Let the event loop turn, and the clock with it."""
        while not reached():
            self.now += 0.001
            await asyncio.sleep(0)


def run_entry(monkeypatch: pytest.MonkeyPatch, test: Callable[[Entry], object], **limits: int) -> None:
    async def inner() -> None:
        entry = Entry(monkeypatch, **limits)
        with entry.stack:
            outcome = test(entry)
            if asyncio.iscoroutine(outcome):
                await outcome
            entry.lobby.close()
            assert not entry.giving_way

    asyncio.run(asyncio.wait_for(inner(), 60))


@pytest.mark.parametrize("late", [KEY, b"GET /v2/health/ready?x HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_who_has_the_key_or_needs_none_does_not_wait_for_the_strangers_before(
    monkeypatch: pytest.MonkeyPatch, late: bytes
) -> None:
    async def burst(entry: Entry) -> None:
        for _ in range(100):
            entry.connect(HEAD + b"\r\n{")
        entry.connect(late)
        # The clock stands still: only as many strangers as may come at once begin
        await entry.accept_until(lambda: late in entry.begun)
        assert len(entry.begun) <= 10
        await entry.until(lambda: len(entry.begun) == 101)

    run_entry(monkeypatch, burst)


@pytest.mark.parametrize("end", [b"", b"\r\n"])
def test_what_waiting_connections_have_sent_has_a_limit(monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    monkeypatch.setattr("trtserve.gateway.lobby._MOST", 100_000)

    async def crowd(entry: Entry) -> None:
        for _ in range(20):
            entry.connect(HEAD + b"x: " + b"y" * 20_000 + b"\r\n" + end)
        entry.connect(KEY)
        await entry.accept_until(lambda: KEY in entry.begun)
        assert 0 < entry.lobby._bytes <= 100_000

    run_entry(monkeypatch, crowd)


@pytest.mark.parametrize("content", [b"", b"P", b"GET /health HTTP/1.1\r\nHos", b"GET / HTTP/1.1\r\nA: b\r\n"])
def test_what_has_not_arrived_begins_nothing_until_the_rest_comes(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    async def drip(entry: Entry) -> None:
        client = entry.connect(content)
        await entry.accept_until(lambda: len(entry.lobby) > 0)
        for part in (
            HEAD[len(content) :] if HEAD.startswith(content) else b"x: y\r\n",
            b"x-api-key: the-key\r\n\r",
            b"\n",
        ):
            await asyncio.sleep(0)
            assert entry.begun == []
            client.sendall(part)
        await entry.until(lambda: bool(entry.begun))
        assert entry.begun[0].endswith(b"the-key\r\n\r\n")
        assert not len(entry.lobby)

    run_entry(monkeypatch, drip)


@pytest.mark.parametrize("content", [b"\x16\x03\x01", b"get / ", b"GET /" + b"x" * (1 << 16)])
def test_what_the_protocol_refuses_does_not_wait_for_its_end(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    async def refused(entry: Entry) -> None:
        entry.connect(content)
        await entry.accept_until(lambda: len(entry.begun) > 0)
        assert content.startswith(entry.begun[0][:3])

    run_entry(monkeypatch, refused)


def test_the_oldest_connection_makes_room_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def crowd(entry: Entry) -> None:
        clients = [entry.connect() for _ in range(5)]
        await entry.accept_until(lambda: len(entry.lobby) >= 3)
        client = entry.connect(KEY)
        await entry.accept_until(lambda: len(entry.begun) > 0)
        assert client.recv(1) == b""  # `_begin` closed it
        assert [each.recv(1) for each in clients[:2]] == [b"", b""]

    run_entry(monkeypatch, crowd, connections=3)


def test_connections_that_send_nothing_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(entry: Entry) -> None:
        clients = [entry.connect() for _ in range(40)]
        await entry.accept_until(lambda: len(entry.lobby) >= len(clients))
        entry.now += 20
        entry.lobby._expire()
        assert 0 < len(entry.lobby) < len(clients)  # a few in one turn
        await entry.until(lambda: not len(entry.lobby))
        assert {client.recv(1) for client in clients} == {b""}

    run_entry(monkeypatch, silent)


def test_what_came_before_the_protocol_is_read_and_not_kept() -> None:
    class Application:
        settings = settings_of()

        async def __call__(self, scope: object, receive: object, send: object) -> None:
            raise AssertionError("no request is whole")

    async def begin() -> None:
        config = uvicorn.Config(Application(), ws="none", lifespan="off", log_config=None)
        config.load()
        protocol = _BoundedProtocol(config, server_state=ServerState(), app_state={})
        protocol.begins_with = b"GET / HTTP/1.1\r\n"
        protocol.connection_made(Mock())
        assert protocol._in_headers
        assert protocol.begins_with == b""
        protocol.connection_lost(None)

    asyncio.run(begin())

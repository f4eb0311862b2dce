"""Connections whose first request has not begun: each costs a socket and what it has sent, and no protocol yet.

A request costs ten times as much as a look at its headers, so those without the key wait for their turn.
"""

from __future__ import annotations

import asyncio
import re
import select
import socket
import time
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable
from typing import Protocol

from trtserve.gateway.settings import RequestLimits

_READ = 64 << 10
# Connections that one turn of the event loop looks at, and requests that it begins: one takes as long as many looks.
_LOOKS, _BEGINS = 16, 4
_PAUSE = 0.01
# Seconds between requests without the key, which so take an eighth of a processor, and how many may come at once.
_STRANGER, _STRANGERS = 0.0025, 8
_MOST = 32 << 20  # bytes that all connections that wait have sent
_METHOD = re.compile(rb"[A-Z]{1,20}( |\Z)")
_BLANK = re.compile(rb"\n\r?\n")


class GivesWay(Protocol):
    """A connection that is closed when another one needs its room."""

    def give_way(self) -> object:
        """Close the connection without waiting for its client."""


class _Newcomer:
    def __init__(self, lobby: Lobby, client: socket.socket, ends: float) -> None:
        self._lobby = lobby
        self.client = client
        self.ends = ends
        self.content = bytearray()
        self.whole = False  # whether it only waits for its turn

    def give_way(self) -> None:
        self._lobby.forget(self)
        self.content.clear()  # it may still be among the strangers
        self.client.close()


class Lobby:
    """Keeps connections until the headers of their first request are there, then hands them on with what they sent."""

    def __init__(
        self,
        limits: RequestLimits,
        giving_way: dict[GivesWay, None],
        others: Callable[[], int],
        knows: Callable[[bytes], bool],
        begin: Callable[[socket.socket, bytes], None],
        *,
        encrypted: bool,
    ) -> None:
        """`giving_way` are the connections that make room, the oldest first, and `others` counts those not here.

        `knows` tells from headers whether a client has the key. `begin` takes over a socket with its first bytes. An
        `encrypted` one is not read, only waited for.
        """
        self._limits, self._giving_way, self._others = limits, giving_way, others
        self._knows, self._begin, self._encrypted = knows, begin, encrypted
        self._strangers: deque[_Newcomer] = deque()
        self._stranger_due = 0.0
        self._turn: TimerHandle | None = None
        self._waiting: dict[int, _Newcomer] = {}  # by file descriptor, the oldest first
        self._bytes = 0
        self._timer: TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        # One for all: a handle of the loop for each costs more than the rest.
        self._ready = select.epoll()
        self._loop.add_reader(self._ready.fileno(), self._look)

    def __len__(self) -> int:
        """Return the number of connections that wait."""
        return len(self._waiting)

    def close(self) -> None:
        """Close all connections that wait."""
        self._loop.remove_reader(self._ready.fileno())
        for timer in filter(None, (self._timer, self._turn)):
            timer.cancel()
        for newcomer in list(self._waiting.values()):
            newcomer.give_way()
        self._ready.close()

    def accept(self, listening: socket.socket) -> None:
        """Take connections, a few in one turn of the event loop. Raises OSError when no file descriptor is left."""
        begun = 0
        for _ in range(_LOOKS):
            try:
                client, _address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            client.setblocking(False)
            newcomer = _Newcomer(self, client, time.monotonic() + self._limits.header_seconds)
            self._waiting[client.fileno()] = newcomer
            self._giving_way[newcomer] = None
            self._ready.register(client, select.EPOLLIN)
            if self._timer is None:
                self._timer = self._loop.call_later(self._limits.header_seconds, self._expire)
            if len(self) + self._others() > self._limits.connections:
                next(iter(self._giving_way)).give_way()
            begun += newcomer in self._giving_way and self._read(newcomer)
            if begun >= _BEGINS:
                return

    def forget(self, newcomer: _Newcomer) -> None:
        """Leave a connection to someone else."""
        if not newcomer.whole:
            self._ready.unregister(newcomer.client)
        self._bytes -= len(newcomer.content)
        del self._waiting[newcomer.client.fileno()], self._giving_way[newcomer]

    def _look(self) -> None:
        begun = 0
        for descriptor, _ in self._ready.poll(0, _LOOKS):
            newcomer = self._waiting.get(descriptor)  # it may have given way since
            begun += newcomer is not None and self._read(newcomer)
            if begun >= _BEGINS:
                return

    def _read(self, newcomer: _Newcomer) -> bool:
        """Read what a connection has sent, and return whether a request begins."""
        try:
            part = newcomer.client.recv(1, socket.MSG_PEEK) if self._encrypted else newcomer.client.recv(_READ)
        except BlockingIOError:
            return False
        except OSError:
            part = b""
        if not part:
            newcomer.give_way()
            return False
        if not self._encrypted:
            newcomer.content += part
            self._bytes += len(part)
            unfinished = self._is_unfinished(newcomer.content, len(part))
            if unfinished or not self._knows(bytes(newcomer.content)):
                if not unfinished:
                    self._ready.unregister(newcomer.client)
                    newcomer.whole = True
                    self._strangers.append(newcomer)
                    if self._turn is None:
                        self._begin_strangers()
                while self._bytes > _MOST:
                    next(iter(self._waiting.values())).give_way()
                return False
        self.forget(newcomer)
        self._begin(newcomer.client, bytes(newcomer.content))
        return True

    def _begin_strangers(self) -> None:
        """Begin the requests without the key whose turn it is."""
        self._turn, now = None, time.monotonic()
        self._stranger_due = max(self._stranger_due, now - _STRANGERS * _STRANGER)
        while self._strangers and self._stranger_due < now:
            stranger = self._strangers.popleft()
            if stranger in self._giving_way:  # else it has gone
                self.forget(stranger)
                self._begin(stranger.client, bytes(stranger.content))
                self._stranger_due += _STRANGER
        if self._strangers:
            self._turn = self._loop.call_later(_PAUSE, self._begin_strangers)

    def _is_unfinished(self, content: bytearray, new: int) -> bool:
        """Return whether a request's headers go on. The protocol refuses what is no HTTP, and what is too long."""
        begins = _METHOD.match(content) is not None and len(content) <= self._limits.header_bytes
        return begins and _BLANK.search(content, max(0, len(content) - new - 3)) is None

    def _expire(self) -> None:
        """Close connections that have waited too long, a few in one turn."""
        self._timer, now = None, time.monotonic()
        for newcomer in list(self._waiting.values())[:_LOOKS]:
            if newcomer.ends <= now:
                newcomer.give_way()
        oldest = next(iter(self._waiting.values()), None)
        if oldest is not None:
            self._timer = self._loop.call_later(max(_PAUSE, oldest.ends - now), self._expire)

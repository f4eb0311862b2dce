"""Timers of an event loop that are more exact than its own.

asyncio rounds timeouts up to the next millisecond of epoll; a timerfd wakes it at the time itself. An idle processor
and cold caches then still cost up to half a millisecond. So after a longer wait the loop wakes early and polls until
the time has come; what arrives in the meantime is handled as usual.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import os
import time
from collections.abc import Callable
from contextlib import suppress

_CLOCK_MONOTONIC = 1
_ABSOLUTE = 1
_SECOND = 1_000_000_000
_LEAD = 300_000
_LONG = 10 * _LEAD  # so that polling takes at most a tenth of a core


class _Setting(ctypes.Structure):
    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


class Timers:
    """Calls functions of the running event loop at absolute times, by one timerfd (Python has its own since 3.13)."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._ring)
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._awake = False

    def call_at(self, time_ns: int, function: Callable[[], None]) -> None:
        """Call `function` at `time_ns` of the monotonic clock."""
        heapq.heappush(self._due, (time_ns, next(self._numbers), function))
        if self._due[0][0] == time_ns and not self._awake:
            self._set()

    async def until(self, time_ns: int) -> None:
        """Return at `time_ns` of the monotonic clock, or at once when that is over."""
        if time_ns > time.monotonic_ns():
            due = self._loop.create_future()
            self.call_at(time_ns, lambda: None if due.done() else due.set_result(None))
            await due

    def _set(self) -> None:
        due = self._due[0][0]
        moment = due - _LEAD if due - time.monotonic_ns() > _LONG else due
        wanted = _Setting(value=divmod(moment, _SECOND))
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(wanted), None)

    def _ring(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._file, 8)
        if not self._awake:
            self._call_due()

    def _call_due(self) -> None:
        self._awake = True
        try:
            while self._due and self._due[0][0] <= time.monotonic_ns():
                heapq.heappop(self._due)[2]()
        finally:
            # After the tasks that were woken just now: setting the timer takes 30 µs on a cold processor.
            self._loop.call_soon(self._sleep)

    def _sleep(self) -> None:
        """Wait for what is due next, or go on polling when that is soon."""
        if self._due and self._due[0][0] - time.monotonic_ns() <= _LEAD:
            self._call_due()
            return
        self._awake = False
        if self._due:
            self._set()

    def close(self) -> None:
        """Forget what is due, and release the timer."""
        self._loop.remove_reader(self._file)
        os.close(self._file)
        self._due.clear()

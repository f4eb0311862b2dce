"""The signals that end a program: made one KeyboardInterrupt, or counted."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# What ends a program that is asked to.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The KeyboardInterrupt of a signal that was counted; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def one_interrupt() -> Iterator[Callable[[], int | None]]:
    """Make a KeyboardInterrupt of SIGINT, SIGTERM and SIGHUP, and ignore those that come while one is on its way out.

    What is begun can then be cleared away in peace. Yields a function that returns the number of the first signal, None
    before there was one. Signals that are ignored stay so; only the main thread receives any.
    """
    received: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        received.append(number)
        # One that was raised where Python drops exceptions (a weak reference's callback) is not on its way.
        if not _interrupt_under_way():
            raise KeyboardInterrupt

    with _handled(interrupt):
        yield lambda: received[0] if received else None


def _interrupt_under_way() -> bool:
    """Whether the code at work handles a KeyboardInterrupt, in a `finally` or an `except`, itself or further out."""
    handled = sys.exc_info()[1]
    while handled is not None and not isinstance(handled, KeyboardInterrupt):
        handled = handled.__context__
    return handled is not None


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Count SIGINT, SIGTERM and SIGHUP instead of being ended by them; yields a function that returns the count.

    The handlers do nothing else, so that a second signal cannot re-enter a stop that is under way. What our parent
    made us ignore (nohup, a shell's background job) stays ignored. Only the main thread receives signals: in any other
    the count stays 0. A KeyboardInterrupt that is raised because of them becomes an Interrupted of the first.
    """
    received: list[int] = []
    with _handled(lambda caught, _frame: received.append(caught)):
        try:
            yield lambda: len(received)
        except KeyboardInterrupt:
            if not received:
                raise
            raise Interrupted(received[0]) from None


@contextmanager
def held_back() -> Iterator[None]:
    """Signals that end a program come after the block; for the import of modules that print what is raised in them."""
    received: list[int] = []
    try:
        with _handled(lambda caught, _frame: received.append(caught)):
            yield
    finally:
        for number in received[:1]:
            signal.raise_signal(number)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have the signals that end a process handled; those that are ignored stay so. Nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)

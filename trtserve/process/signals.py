"""Signals: interrupts of this process, and the end of child processes with their parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# Signals that ask a program to end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END = b"\0"
_AGAIN = 0.05  # seconds until a postponed signal is sent again


class Interrupted(KeyboardInterrupt):
    """The KeyboardInterrupt of a counted signal, with its `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT by a KeyboardInterrupt, after the import of NumPy if that is under way."""
    if not _postponed(number, frame):
        raise KeyboardInterrupt


def _postponed(number: int, frame: FrameType | None) -> bool:
    """Send the signal again in a moment while NumPy or a part of it is being imported: half imported, it prints a
    traceback. C code of other packages imports parts of it too.
    """
    under_way = getattr(getattr(sys.modules.get("numpy"), "__spec__", None), "_initializing", False)
    while frame is not None and not under_way:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            under_way = str(frame.f_locals.get("name")).partition(".")[0] == "numpy"
        frame = frame.f_back
    if not under_way:
        return False
    timer = threading.Timer(_AGAIN, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()
    return True


@contextmanager
def one_interrupt(at_once: Callable[[], None] = lambda: None) -> Iterator[Callable[[], int | None]]:
    """Raise KeyboardInterrupt for SIGINT, SIGTERM and SIGHUP, and ignore further ones while it is being handled.

    This lets the caller clean up unfinished work. Yields a function that returns the number of the first signal, or
    None before there was one. Ignored signals stay ignored; only the main thread receives signals. A library may keep
    that thread for seconds, so another thread calls `at_once` with the first signal.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _postponed(number, frame):
            return
        received.append(number)
        # Python drops exceptions raised in a weak reference's callback, so raise it again.
        if not _interrupt_under_way():
            raise KeyboardInterrupt

    with _handled(interrupt), _watched(at_once):
        yield lambda: received[0] if received else None


@contextmanager
def _watched(at_once: Callable[[], None]) -> Iterator[None]:
    """Call a function in a thread as soon as a handled signal arrives, whatever the main thread does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        # The interpreter writes the number of each signal at once, and calls handlers when a library returns.
        while (caught := os.read(reading, 1)) != _END:
            if caught[0] in ENDING:
                at_once()
                return

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        with suppress(OSError):
            os.write(writing, _END)
        thread.join()
        os.close(reading)
        os.close(writing)


def _interrupt_under_way() -> bool:
    """Return whether a KeyboardInterrupt is being handled, in a `finally` or an `except` of any running function."""
    handled = sys.exc_info()[1]
    while handled is not None and not isinstance(handled, KeyboardInterrupt):
        handled = handled.__context__
    return handled is not None


@contextmanager
def stop_signals() -> Iterator[Callable[[], int]]:
    """Count SIGINT, SIGTERM and SIGHUP instead of ending; yields a function that returns the count.

    The handlers do nothing else, so that a second signal cannot interrupt a stop. Signals that the parent process made
    us ignore (nohup, a shell's background job) stay ignored. Only the main thread receives signals: in any other one
    the count stays 0. A KeyboardInterrupt raised in the block becomes an Interrupted with the first signal.
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
    """Delay signals until the end of the block, for imports of modules that print exceptions raised in them."""
    received: list[int] = []
    try:
        with _handled(lambda caught, _frame: received.append(caught)):
            yield
    finally:
        for number in received[:1]:
            signal.raise_signal(number)


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler for the ending signals that are not ignored; do nothing outside the main thread."""
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


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: int = signal.SIGTERM, *, waited_for: bool = False) -> Callable[[], None] | None:
    """Return a function for a child to call first, so that it gets signal `number` when its parent ends; or None.

    Only Linux has it (prctl(2)), and there "parent" means the thread that started the child: from another thread than
    the main one the child would end with that thread. So it is not used there, unless that thread waits for the child
    (`waited_for`). Grandchildren are not affected.
    """
    if sys.platform != "linux":
        return None
    if not waited_for and threading.current_thread() is not threading.main_thread():
        return None
    import ctypes

    # Looked up before the fork, and called without releasing the GIL: after the fork a child may do very little.
    prctl = ctypes.PyDLL(None).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # The parent ended before the call.
            os._exit(128 + number)

    return ask

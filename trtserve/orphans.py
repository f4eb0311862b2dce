"""No orphans: what the kernel does for a process whose parent was killed and could not end it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: int = signal.SIGTERM, *, waited_for: bool = False) -> Callable[[], None] | None:
    """What a child runs first, to get signal `number` when its parent is gone; None where that cannot be.

    Linux alone has it (prctl(2)), and it means the thread that started the child: from another thread than the main one
    the child would be ended with that thread, so it is not asked for there, unless that thread waits for the child
    (`waited_for`). A program's own children are its affair.
    """
    if sys.platform != "linux":
        return None
    if not waited_for and threading.current_thread() is not threading.main_thread():
        return None
    import ctypes

    # Found before the fork, and called without giving up the GIL: the child may do little before its program.
    prctl = ctypes.PyDLL(None).prctl
    parent = os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # it ended before it was asked for
            os._exit(128 + number)

    return ask

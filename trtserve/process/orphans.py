"""End child processes when their parent is killed, with the kernel's parent-death signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

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

"""An event loop whose clock jumps to the next timer when nothing else is left to do: a busy machine changes nothing."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from contextlib import closing
from typing import Any

import pytest


class _Clock(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout if timeout is None else 0)
        if not found and timeout:
            self.now += timeout
        return found


def run_in_virtual_time(work: Coroutine[Any, Any, object], seconds: float = 1000.0) -> None:
    """Run `work`, which may take `seconds` of virtual time and uses no thread; `time.monotonic` shows that time."""
    clock = _Clock()
    with pytest.MonkeyPatch.context() as patch, closing(asyncio.SelectorEventLoop(clock)) as loop:
        patch.setattr(time, "monotonic", lambda: clock.now)
        loop.run_until_complete(asyncio.wait_for(work, seconds))

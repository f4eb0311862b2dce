"""Wait, with a time limit, for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(wanted: Callable[[], object], seconds: float = 60.0) -> bool:
    """Return whether a condition comes true within `seconds`."""
    begin = time.monotonic()
    while not wanted():
        waited = time.monotonic() - begin
        if waited > seconds:
            return False
        time.sleep(min(0.01 + waited / 20, 0.1))  # looking at processes costs more than many of them do
    return True


def wait_until(wanted: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition that must come true within `seconds`."""
    assert eventually(wanted, seconds), f"the condition did not come true in {seconds:g} seconds"

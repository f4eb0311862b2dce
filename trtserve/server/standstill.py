"""Notice that Triton waits for ever: its Python stubs have loaded their models, and no process does anything."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

import psutil

from trtserve.process import ProcessId

# Models of trtserve load within seconds of CPU time; idle stubs use less than 0.3 s a minute.
_LONGEST = 60.0
_LEAST_WORK = 1.0


class Standstill:
    """Looks again and again at the stubs of models that are loading.

    Triton 2.51 does not always notice that a stub has answered. That was seen on busy machines, twice in some ten
    thousand starts, with a stub and a server that both waited for a message.
    """

    def __init__(self) -> None:
        self._stubs: frozenset[int] = frozenset()
        self._used = 0.0
        self._since = 0.0

    def lasts(self, stubs: Collection[ProcessId]) -> bool:
        """Return whether the same stubs have used almost no CPU time for a minute."""
        pids, used, now = frozenset(each.pid for each in stubs), sum(map(_cpu_seconds, stubs)), time.monotonic()
        if not pids or pids != self._stubs or used - self._used > _LEAST_WORK:
            self._stubs, self._used, self._since = pids, used, now
        return now - self._since > _LONGEST


def _cpu_seconds(process: ProcessId) -> float:
    with suppress(psutil.Error):
        times = psutil.Process(process.pid).cpu_times()
        return float(times.user + times.system)
    return 0.0

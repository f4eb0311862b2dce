"""What a sending process knows about itself: whether its own CPU, event loop or garbage collector was the limit."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path

_INTERVAL = 0.05
_SCHEDSTAT = Path("/proc/self/schedstat")


@dataclass(kw_only=True)
class Health:
    """One worker's own state over the measured window."""

    worker: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    """Share of one core that the process used."""
    loop_lag_p99_ms: float = 0.0
    """How late the event loop ran a timer; includes the up to 1 ms by which epoll rounds up."""
    loop_lag_max_ms: float = 0.0
    gc_pause_max_ms: float = 0.0
    run_queue_ms: float = 0.0
    """Time in which the process could run and the kernel ran others."""
    write_blocked_max_ms: float = 0.0
    """Longest time for which a socket took no more of a request (HTTP; gRPC hides its sockets)."""
    crowded_reads: int = 0
    """Reads of events that found 32 KiB or more waiting, so that all of them got one time (HTTP)."""
    late_connections: int = 0
    """Connections opened inside the window."""


@dataclass
class HealthMonitor:
    """Measures the process between `begin` and `end`."""

    worker: int
    _lags: list[float] = field(default_factory=list)
    _pauses: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Start measuring."""
        gc.callbacks.append(self._on_gc)
        self._began, self._cpu, self._queued = time.monotonic(), time.process_time(), _run_queue_ns()
        self._beat = asyncio.ensure_future(self._heartbeat())

    def end(self) -> Health:
        """Stop measuring and return the figures."""
        self._beat.cancel()
        gc.callbacks.remove(self._on_gc)
        gc.unfreeze()
        seconds = time.monotonic() - self._began
        lags = sorted(self._lags) or [0.0]
        return Health(
            worker=self.worker,
            seconds=seconds,
            cpu=(time.process_time() - self._cpu) / max(seconds, 1e-9),
            loop_lag_p99_ms=lags[int(0.99 * (len(lags) - 1))] * 1e3,
            loop_lag_max_ms=lags[-1] * 1e3,
            gc_pause_max_ms=max(self._pauses, default=0.0) * 1e3,
            run_queue_ms=(_run_queue_ns() - self._queued) / 1e6,
        )

    async def _heartbeat(self) -> None:
        while True:
            due = time.monotonic() + _INTERVAL
            await asyncio.sleep(_INTERVAL)
            self._lags.append(max(0.0, time.monotonic() - due))

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_began = time.perf_counter()
        else:
            self._pauses.append(time.perf_counter() - self._gc_began)


def _run_queue_ns() -> int:
    try:
        return int(_SCHEDSTAT.read_text().split()[1])
    except (OSError, IndexError, ValueError):  # a kernel without scheduler statistics
        return 0

"""What is watched during a run: counters and health of the workers, the machine, and the server's metrics."""

from __future__ import annotations

import asyncio
import gc
import http.client
import math
import threading
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

from trtserve.bench.records import Real, Whole
from trtserve.client.metrics import KV_BLOCKS, REQUESTS, TOKENS, core_metrics, model_metrics, parse
from trtserve.files import LARGEST_TEXT
from trtserve.host.gpus import gpu_load_reader
from trtserve.host.ports import web_opener

_COUNTERS = ("sent", "ended", "failed")
_PER_DECADE = 20  # buckets of the histogram are 12 % wide
_DECADES = 7  # 10 µs to 100 s
_SMALLEST_MS = 0.01
SIZE = len(_COUNTERS) + _PER_DECADE * _DECADES


class Live:
    """Counts of one worker and a histogram of times to the first response; only the worker writes."""

    def __init__(self, cells: MutableSequence[int] | None = None) -> None:
        self.cells: MutableSequence[int] = [0] * SIZE if cells is None else cells

    def sent(self) -> None:
        """Count a request that was sent."""
        self.cells[0] += 1

    def ended(self, *, failed: bool, first_ms: float | None) -> None:
        """Count a request that ended, whose first response came after `first_ms`."""
        self.cells[1] += 1
        self.cells[2] += failed
        if first_ms is not None:
            place = int(math.log10(max(first_ms, _SMALLEST_MS) / _SMALLEST_MS) * _PER_DECADE)
            self.cells[len(_COUNTERS) + min(place, SIZE - len(_COUNTERS) - 1)] += 1

    def reset(self) -> None:
        """Forget the warm-up."""
        for place in range(SIZE):
            self.cells[place] = 0


def shared_cells() -> MutableSequence[int]:
    """Return cells in memory that a child process shares."""
    cells: MutableSequence[int] = RawArray("q", SIZE)
    return cells


class Totals:
    """The sum over all workers at one moment."""

    def __init__(self, workers: Sequence[Live]) -> None:
        cells = [sum(column) for column in zip(*(worker.cells for worker in workers), strict=True)]
        self.sent, self.ended, self.failed = cells[: len(_COUNTERS)]
        self._histogram = cells[len(_COUNTERS) :]

    @property
    def in_flight(self) -> int:
        """Requests that were sent and have not ended."""
        return int(self.sent - self.ended)

    def first_ms(self, quantile: float) -> float | None:
        """Return a percentile of the time to the first response, within 12 %, or None before the first."""
        wanted, seen = quantile * sum(self._histogram), 0
        for place, count in enumerate(self._histogram):
            seen += count
            if count and seen >= wanted:
                return float(_SMALLEST_MS * 10 ** ((place + 0.5) / _PER_DECADE))
        return None


_INTERVAL = 0.05
_SCHEDSTAT = Path("/proc/self/schedstat")


@dataclass(kw_only=True)
class WorkerHealth:
    """One worker's own state over the measured window."""

    worker: Whole = 0
    seconds: Real = 0.0
    cpu: Real = 0.0  # share of one core that the process used
    loop_lag_p99_ms: Real = 0.0
    """How late the event loop ran a timer; includes the up to 1 ms by which epoll rounds up."""
    loop_lag_max_ms: Real = 0.0
    gc_pause_max_ms: Real = 0.0
    run_queue_ms: Real = 0.0  # time in which the process could run and the kernel ran others
    write_blocked_max_ms: Real = 0.0
    """Longest time for which a socket took no more of a request (HTTP; gRPC hides its sockets)."""
    crowded_reads: Whole = 0
    """Reads of events that found 32 KiB or more waiting, so that all of them got one time (HTTP)."""
    late_connections: Whole = 0  # connections opened inside the window


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

    def end(self) -> WorkerHealth:
        """Stop measuring and return the figures."""
        self._beat.cancel()
        gc.callbacks.remove(self._on_gc)
        seconds = time.monotonic() - self._began
        lags = sorted(self._lags) or [0.0]
        return WorkerHealth(
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


_NOT_USED = ("idle", "iowait", "guest", "guest_nice")  # guests' times are part of others


class OtherPrograms:
    """What programs that are neither the client nor its server took of the processors, from its making on.

    Processors that neither of them may use do not count.
    """

    def __init__(self, server: Sequence[int]) -> None:
        import psutil

        self._processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        for pid in server:
            with suppress(psutil.Error):
                self._processes.append(psutil.Process(pid))
        self._cpus: set[int] = set()
        for process in self._processes:
            with suppress(psutil.Error):
                self._cpus.update(process.cpu_affinity())
        self._server = tuple(server)
        self._began, self._before, self._threads = time.monotonic(), self._used(), _thread_times(self._server)

    def processors(self) -> float:
        """Return how many processors they used on average."""
        return max(0.0, self._used() - self._before) / max(1e-9, time.monotonic() - self._began)

    def server_waited(self) -> float | None:
        """Return the part of the time they had work that the server's threads waited for a processor; None: unknown."""
        ran = waited = 0
        for thread, times in _thread_times(self._server).items():
            before = self._threads.get(thread, (0, 0))
            ran, waited = ran + times[0] - before[0], waited + times[1] - before[1]
        return waited / (ran + waited) if ran + waited else None

    def _used(self) -> float:
        """Return the seconds of processors that other programs have used since the machine was started."""
        import psutil

        seconds = 0.0
        for cpu, times in enumerate(psutil.cpu_times(percpu=True)):
            if cpu in self._cpus:
                seconds += sum(times) - sum(getattr(times, name, 0.0) for name in _NOT_USED)
        for process in self._processes:
            with suppress(psutil.Error):
                seconds -= sum(process.cpu_times()[:2])
        return seconds


def _thread_times(processes: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return the nanoseconds that each thread of these processes has run, and has waited for a processor."""
    found = {}
    for each in (path for pid in processes for path in Path(f"/proc/{pid}/task").glob("*/schedstat")):
        with suppress(OSError, ValueError):  # a thread that has ended, or a kernel without scheduler statistics
            ran, waited, _ = each.read_text().split()
            found[str(each)] = int(ran), int(waited)
    return found


INTERVAL = 0.5
_TIMEOUT = 2.0
# Counters of Triton, per model, whose growth over the run is reported.
_DURATIONS = ("queue_duration_us", "compute_input_duration_us", "compute_infer_duration_us", "request_duration_us")
_COUNTS = ("request_success", "request_failure", "count", "exec_count")
# What is parsed of a page, next to requests that must be sent in time.
_READ = (KV_BLOCKS, REQUESTS, TOKENS, *(f"nv_inference_{name}" for name in (*_DURATIONS, *_COUNTS)))

OnSample = Callable[[Totals], None]


@dataclass(kw_only=True)
class Samples:
    """Rows over time, and the growth of the server's counters."""

    rows: list[dict[str, Real]] = field(default_factory=list)
    """Every half second: `time_ns` (monotonic), in_flight, ended, cpu, steal, memory_bytes, and what else was read."""
    server: dict[str, dict[str, Real]] = field(default_factory=dict)
    """Model → counter → growth from the first to the last reading of the metrics page."""
    others: Real | None = None  # processors that programs besides client and server used on average; None: unknown
    server_waited: Real | None = None  # part of the time it had work that the server waited for a processor
    tokens: dict[str, Real] = field(default_factory=dict)
    """Growth of the core models' token counters: prompt and generated."""


class LoadSampler:
    """Samples in a thread between `begin` and `end`.

    `metrics` is the address of the server's metrics page, `server` the processes of a server on this machine.
    """

    def __init__(
        self, metrics: str | None = None, *, server: Sequence[int] = (), on_sample: OnSample = lambda _: None
    ) -> None:
        self.samples = Samples()
        self._server = server
        self._metrics, self._on_sample = metrics, on_sample
        self._stopped = threading.Event()
        self._gpu = gpu_load_reader()

    def begin(self, totals: Callable[[], Totals]) -> None:
        """Start sampling."""
        import psutil

        psutil.cpu_times_percent()
        self._totals = totals
        self._before = self._page()
        self._others = OtherPrograms(self._server)
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop sampling, and read the server's counters for the last time."""
        self._stopped.set()
        self._thread.join()
        self.samples.others, self.samples.server_waited = self._others.processors(), self._others.server_waited()
        after = self._page()
        if self._before is None or after is None:
            return
        self.samples.server = {
            name: {key: values[key] - self._before[0].get(name, {}).get(key, 0.0) for key in values}
            for name, values in after[0].items()
        }
        self.samples.tokens = {kind: value - self._before[1].get(kind, 0.0) for kind, value in after[1].items()}

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            self.samples.rows.append(self._sample())
            due += INTERVAL
            if self._stopped.wait(max(0.0, due - time.monotonic())):
                return

    def _sample(self) -> dict[str, float]:
        import psutil

        totals = self._totals()
        cpu = psutil.cpu_times_percent()
        row = {
            "time_ns": time.monotonic_ns(),
            "in_flight": totals.in_flight,
            "ended": totals.ended,
            "cpu": 100.0 - cpu.idle,
            "steal": getattr(cpu, "steal", 0.0),
            "memory_bytes": psutil.virtual_memory().used,
            **self._gpu(),
        }
        page = self._page()
        if page is not None:
            row |= page[2]
        self._on_sample(totals)
        return row

    def _page(self) -> tuple[dict[str, dict[str, float]], dict[str, float], dict[str, float]] | None:
        """Return counters by model, token counters, and the gauges of the core model."""
        if self._metrics is None:
            return None
        try:
            with web_opener(direct=True).open(self._metrics, timeout=_TIMEOUT) as page:
                samples = parse(page.read(LARGEST_TEXT).decode("utf-8", "replace"), _READ)
        except (OSError, http.client.HTTPException):
            return None
        counters = {
            each.model: {name: each.values[name] for name in (*_DURATIONS, *_COUNTS) if name in each.values}
            for each in model_metrics(samples)
        }
        cores = core_metrics(samples)
        tokens: dict[str, float] = {}
        gauges: dict[str, float] = {}
        for core in cores:
            for kind, value in core.families.get(TOKENS, {}).items():
                tokens[kind] = tokens.get(kind, 0.0) + value
            used, most = core.value(KV_BLOCKS, "used"), core.value(KV_BLOCKS, "max")
            if used is not None and most:
                gauges["kv_use"] = used / most
            for kind in ("active", "scheduled"):
                number = core.value(REQUESTS, kind)
                if number is not None:
                    gauges["batch_size" if kind == "scheduled" else "active_requests"] = number
        return counters, tokens, gauges


def queue_wait_ms(server: Mapping[str, Mapping[str, float]], model: str) -> float | None:
    """Return the mean wait in Triton's queue of `model` during the run."""
    values = server.get(model, {})
    requests = values.get("request_success", 0.0)
    return values["queue_duration_us"] / requests / 1000 if requests and "queue_duration_us" in values else None

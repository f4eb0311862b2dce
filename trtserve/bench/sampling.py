"""What the machine and the server did during a run, sampled beside it."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trtserve.bench.live import Totals
from trtserve.client.metrics import (
    KV_BLOCKS,
    REQUESTS,
    TOKENS,
    core_metrics,
    model_metrics,
    parse,
)
from trtserve.host.nvidia import gpu_load_reader

INTERVAL = 0.5
_TIMEOUT = 2.0
# Counters of Triton, per model, whose growth over the run is reported.
_DURATIONS = ("queue_duration_us", "compute_input_duration_us", "compute_infer_duration_us", "request_duration_us")
_COUNTS = ("request_success", "request_failure", "inference_count", "exec_count")

OnSample = Callable[[Totals], None]


@dataclass(kw_only=True)
class Samples:
    """Rows over time, and the growth of the server's counters."""

    rows: list[dict[str, float]] = field(default_factory=list)
    """Every half second: `time_ns` (monotonic), in_flight, ended, cpu, steal, memory_bytes, and what else was read."""
    server: dict[str, dict[str, float]] = field(default_factory=dict)
    """Model → counter → growth from the first to the last reading of the metrics page."""
    tokens: dict[str, float] = field(default_factory=dict)
    """Growth of the core models' token counters: prompt and generated."""


class Sampler:
    """Samples in a thread between `begin` and `end`; `metrics` is the address of the server's metrics page."""

    def __init__(self, metrics: str | None = None, *, on_sample: OnSample = lambda _: None) -> None:
        self.samples = Samples()
        self._metrics, self._on_sample = metrics, on_sample
        self._stopped = threading.Event()
        self._gpu = gpu_load_reader()

    def begin(self, totals: Callable[[], Totals]) -> None:
        """Start sampling."""
        import psutil

        psutil.cpu_times_percent()
        self._totals = totals
        self._before = self._page()
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop sampling, and read the server's counters for the last time."""
        self._stopped.set()
        self._thread.join()
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
            with urllib.request.urlopen(self._metrics, timeout=_TIMEOUT) as page:
                samples = parse(page.read().decode("utf-8", "replace"))
        except (OSError, urllib.error.URLError):
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

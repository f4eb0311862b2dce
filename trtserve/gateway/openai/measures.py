"""What clients of the endpoint experience, as Prometheus metrics: Triton measures neither first tokens nor gaps."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Histogram, generate_latest

_FIRST = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 30, 60)
_GAPS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)


class Measures:
    """The metrics of one endpoint."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._first = Histogram(
            "trtserve_openai_time_to_first_token_seconds",
            "From the request to the first streamed text.",
            buckets=_FIRST,
            registry=self._registry,
        )
        self._gaps = Histogram(
            "trtserve_openai_inter_token_seconds",
            "Between two pieces of streamed text.",
            buckets=_GAPS,
            registry=self._registry,
        )

    def page(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def stopwatch(self) -> Stopwatch:
        """Return the times of one streamed answer, which begin now."""
        return Stopwatch(self._first, self._gaps)


class Stopwatch:
    """Observes the time to the first piece and between pieces."""

    def __init__(self, first: Histogram, gaps: Histogram) -> None:
        self._histogram, self._gaps = first, gaps
        self._last = time.perf_counter()

    def piece(self) -> None:
        """Note that a piece came."""
        now = time.perf_counter()
        self._histogram.observe(now - self._last)
        self._histogram, self._last = self._gaps, now

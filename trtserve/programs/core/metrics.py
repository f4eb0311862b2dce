"""The metrics of TensorRT-LLM's Triton backend, computed from the executor's iteration statistics."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable
from datetime import datetime
from itertools import accumulate
from typing import Any

import triton_python_backend_utils as pb_utils

# Family → (help text, label, {label value: field of the statistics}).
_FAMILIES: dict[str, tuple[str, str, dict[str, str]]] = {
    "nv_trt_llm_request_metrics": (
        "TRT LLM request metrics",
        "request_type",
        {
            "active": "num_active_requests",
            "max": "max_num_active_requests",
            "scheduled": "num_scheduled_requests",
            "context": "num_context_requests",
            "waiting": "waiting_requests",
        },
    ),
    "nv_trt_llm_runtime_memory_metrics": (
        "TRT LLM runtime memory metrics",
        "memory_type",
        {"cpu": "cpu_mem_usage", "gpu": "gpu_mem_usage", "pinned": "pinned_mem_usage"},
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "TRT LLM KV cache block metrics",
        "kv_cache_block_type",
        {
            "max": "max_num_blocks",
            "free": "free_num_blocks",
            "used": "used_num_blocks",
            "tokens_per": "tokens_per_block",
            "reused": "reused_blocks",
            "fraction": "kv_cache_fraction",
        },
    ),
    "nv_trt_llm_general_metrics": (
        "General TRT LLM metrics",
        "general_type",
        {"timestamp": "timestamp", "iteration_counter": "iter"},
    ),
}
_INFLIGHT = (
    "TRT LLM inflight_batcher-specific metrics",
    "inflight_batcher_specific_metric",
    {
        "total_context_tokens": "num_ctx_tokens",
        "generation_requests": "num_gen_requests",
        "micro_batch_id": "micro_batch_id",
        "paused_requests": "num_paused_requests",
    },
)
_STATIC = (
    "TRT LLM v1-specific metrics",
    "v1_specific_metric",
    {
        "total_context_tokens": "num_ctx_tokens",
        "total_generation_tokens": "num_gen_tokens",
        "empty_generation_slots": "empty_gen_slots",
    },
)
# Added by trtserve: counts tokens while requests run; the histograms of lengths count finished requests.
_TOKENS = "nv_trtserve_tokens_total"
_DRAFTS = "nv_trtserve_draft_tokens_total"  # also added: what executors count in `specdec_stats`
# And the times of streams, in buckets as a histogram of Prometheus has them. Triton's own histograms cost a message for
# each token.
_FIRST = "nv_trtserve_first_token_seconds"
_GAPS = "nv_trtserve_inter_token_seconds"
_QUEUE = "nv_trtserve_queue_seconds"
_TIME_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, math.inf)
_LENGTH_BUCKETS = [10, 50, 100, 500, 1000]


class _Times:
    """A histogram of seconds, which counts here and is reported as counters."""

    def __init__(self, name: str, description: str, labels: dict[str, str]) -> None:
        self._counts, self._reported = [0] * len(_TIME_BUCKETS), [0] * len(_TIME_BUCKETS)
        self._sum = self._reported_sum = 0.0
        self.families = [
            pb_utils.MetricFamily(name=f"{name}_{part}", description=description, kind=pb_utils.MetricFamily.COUNTER)
            for part in ("bucket", "count", "sum")
        ]
        bucket, count, total = self.families
        names = ["+Inf" if bound == math.inf else f"{bound:g}" for bound in _TIME_BUCKETS]
        self._buckets = [bucket.Metric(labels={**labels, "le": each}) for each in names]
        self._count, self._total = count.Metric(labels=labels), total.Metric(labels=labels)

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(_TIME_BUCKETS, seconds)] += times
        self._sum += seconds * times

    def report(self) -> None:
        """Send what has come since the last report."""
        total, counts = self._sum, list(accumulate(self._counts))
        changes = [now - before for now, before in zip(counts, self._reported, strict=True)]
        if not changes[-1]:
            return
        for metric, change in zip((*self._buckets, self._count), (*changes, changes[-1]), strict=True):
            if change:
                metric.increment(change)
        self._total.increment(total - self._reported_sum)
        self._reported, self._reported_sum = counts, total

    def clear(self) -> None:
        self._buckets.clear()
        del self._count, self._total
        self.families.clear()


class MetricsReporter:
    """The metrics of one model instance; `warn` gets a line for each field that the statistics lack."""

    def __init__(self, model: str, version: str, *, static: bool, warn: Callable[[str], None]) -> None:
        self._labels = {"model": model, "version": version}
        self._warn = warn
        self._warned: set[str] = set()
        self._last: dict[tuple[str, str], float] = {}
        name = "nv_trt_llm_v1_metrics" if static else "nv_trt_llm_inflight_batcher_metrics"
        table = {**_FAMILIES, name: _STATIC if static else _INFLIGHT}
        self._families: list[Any] = []
        self._gauges: dict[tuple[str, str], Any] = {}
        for family_name, (description, label, fields) in table.items():
            family = pb_utils.MetricFamily(name=family_name, description=description, kind=pb_utils.MetricFamily.GAUGE)
            self._families.append(family)
            for value, field in fields.items():
                self._gauges[family_name, field] = family.Metric(labels={**self._labels, label: value})
        self._counters = self._counted(_TOKENS, "Tokens of the requests", "token_type", ("prompt", "generated"))
        kinds = ("drafted", "accepted")
        drafts = self._counted(_DRAFTS, "Draft tokens of speculative decoding", "draft_token_type", kinds)
        self._drafts = {"num_draft_tokens": drafts["drafted"], "num_accepted_tokens": drafts["accepted"]}
        self._first = _Times(_FIRST, "From a streamed request to its first token", self._labels)
        self._gaps = _Times(_GAPS, "Between two tokens of a stream", self._labels)
        self._queue = _Times(_QUEUE, "From a request to the step that begins it", self._labels)
        self._tokens = dict.fromkeys(self._counters, 0)
        self._lock = threading.Lock()
        self._input_lengths = self._histogram("nv_llm_input_token_len", "total_input_tokens")
        self._output_lengths = self._histogram("nv_llm_output_token_len", "total_output_tokens")

    def _counted(self, name: str, description: str, label: str, kinds: tuple[str, ...]) -> dict[str, Any]:
        """Return a counter for each value of the label."""
        family = pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.COUNTER)
        self._families.append(family)
        return {kind: family.Metric(labels={**self._labels, label: kind}) for kind in kinds}

    def _histogram(self, name: str, label: str) -> Any:
        """A histogram of lengths, or None when this Triton's Python backend has no histograms."""
        kind = getattr(pb_utils.MetricFamily, "HISTOGRAM", None)
        if kind is None:
            return None
        family = pb_utils.MetricFamily(name=name, description="TRT LLM response metrics", kind=kind)
        self._families.append(family)
        return family.Metric(labels={**self._labels, "response_metric_type": label}, buckets=_LENGTH_BUCKETS)

    def close(self) -> None:
        """Remove the metrics from the server.

        Triton 2.51's stub would do it only after its connection is gone, and crash.
        """
        self._input_lengths = self._output_lengths = None
        self._gauges.clear()
        self._counters.clear()
        self._drafts.clear()
        for times in (self._first, self._gaps, self._queue):
            times.clear()
        self._families.clear()

    def add_tokens(self, *, prompt: int = 0, generated: int = 0) -> None:
        """Count tokens for the next report; each change of a metric costs a message to the server."""
        with self._lock:
            self._tokens["prompt"] += prompt
            self._tokens["generated"] += generated

    def observe_tokens(self, seconds: float, tokens: int, *, first: bool) -> None:
        """Record the time that tokens of a stream took together; only one thread may."""
        if first:
            self._first.observe(seconds)
        elif tokens > 0:
            self._gaps.observe(seconds / tokens, tokens)

    def observe_request(self, input_tokens: int, output_tokens: int) -> None:
        """Record the lengths of one finished executor request."""
        if self._input_lengths is not None:
            self._input_lengths.observe(input_tokens)
            self._output_lengths.observe(output_tokens)

    def report(self, records: list[Any]) -> None:
        """Update the counters, and set every gauge from the newest record, if there is one."""
        with self._lock:
            counted, self._tokens = self._tokens, dict.fromkeys(self._tokens, 0)
        for kind, tokens in counted.items():
            if tokens:
                self._counters[kind].increment(tokens)
        for record in records:
            if begun := getattr(record, "num_new_active_requests", 0):  # those of one step count with their mean
                self._queue.observe(record.new_active_requests_queue_latency_ms / 1000 / begun, begun)
        for times in (self._first, self._gaps, self._queue):
            times.report()
        for field, counter in self._drafts.items():
            parts = (getattr(record, "specdec_stats", None) for record in records)
            if count := sum(getattr(part, field) for part in parts if part is not None):
                counter.increment(count)
        if records:
            self._show(records[-1])

    def _show(self, record: Any) -> None:
        """Set the gauges."""
        values = _values(record)
        for (family, field), gauge in self._gauges.items():
            value = values.get(field)
            if value is not None and value != self._last.get((family, field)):
                gauge.set(value)  # only when it changed, because each set is a message to the server
                self._last[family, field] = value
            elif value is None and field not in self._warned:
                self._warned.add(field)
                self._warn(f"The executor's statistics have no {field}, so {family} lacks it.")


def _values(record: Any) -> dict[str, float]:
    """Return field → number from the record or its parts, and the computed fields."""
    parts = (record, record.kv_cache_stats, record.static_batching_stats, record.inflight_batching_stats)
    fields = {field for _, _, table in (*_FAMILIES.values(), _INFLIGHT, _STATIC) for field in table.values()}
    values: dict[str, Any] = {}
    for field in fields:
        values[field] = next((value for part in parts if (value := getattr(part, field, None)) is not None), None)
    form = "%m-%d-%Y %H:%M:%S.%f" if "." in record.timestamp else "%m-%d-%Y %H:%M:%S"
    values["timestamp"] = datetime.strptime(record.timestamp, form).timestamp()
    if values["num_scheduled_requests"] is not None:
        values["waiting_requests"] = values["num_active_requests"] - values["num_scheduled_requests"]
    if values["max_num_blocks"] is not None:
        values["kv_cache_fraction"] = values["used_num_blocks"] / max(1, values["max_num_blocks"])
    return values

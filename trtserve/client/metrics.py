"""Read Triton's metrics page: Prometheus' text format, with the metrics of Triton and of the core models.

Names with `trtserve` are trtserve's own; the others are NVIDIA's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

CORE_LABELS: Mapping[str, str] = {
    "nv_trt_llm_request_metrics": "request_type",
    "nv_trt_llm_runtime_memory_metrics": "memory_type",
    "nv_trt_llm_kv_cache_block_metrics": "kv_cache_block_type",
    "nv_trt_llm_inflight_batcher_metrics": "inflight_batcher_specific_metric",
    "nv_trt_llm_v1_metrics": "v1_specific_metric",
    "nv_trt_llm_disaggregated_serving_metrics": "disaggregated_serving_type",
    "nv_trt_llm_general_metrics": "general_type",
    "nv_trtserve_tokens_total": "token_type",
    "nv_trtserve_draft_tokens_total": "draft_token_type",
}
"""Family of a core model → the label that distinguishes its values."""

LENGTHS = ("nv_llm_input_token_len", "nv_llm_output_token_len")
"""Histograms of a core model: tokens of prompts and of answers, one observation for each finished request."""

REQUESTS = "nv_trt_llm_request_metrics"
KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
GENERAL = "nv_trt_llm_general_metrics"
TOKENS = "nv_trtserve_tokens_total"

_INFERENCE = "nv_inference_"
_GPU = "nv_gpu_"


@dataclass(frozen=True, kw_only=True)
class CoreMetrics:
    """The metrics of one core model."""

    model: str
    version: str
    families: Mapping[str, Mapping[str, float]]
    """Family → value of its label → number. The histograms LENGTHS have `count` (requests), `sum` (tokens) and `le N`
    (requests of at most N tokens)."""

    def value(self, family: str, kind: str) -> float | None:
        """One number, or None when the model does not report it."""
        return self.families.get(family, {}).get(kind)


@dataclass(frozen=True, kw_only=True)
class ModelMetrics:
    """Triton's own metrics of one model."""

    model: str
    version: str
    values: Mapping[str, float]
    """The `nv_inference_…` families without that prefix, summed over other labels."""

    def mean_ms(self, duration: str) -> float | None:
        """Return mean milliseconds per successful request of a cumulative `duration`, or None before the first."""
        requests, total = self.values.get("request_success"), self.values.get(duration)
        return total / requests / 1000 if requests and total is not None else None


@dataclass(frozen=True, kw_only=True)
class GpuMetrics:
    """Triton's metrics of one GPU."""

    uuid: str
    values: Mapping[str, float]
    """The `nv_gpu_…` families without that prefix: `utilization` (0 … 1), `memory_used_bytes` and others."""


def parse(text: str, names: tuple[str, ...] = ("nv_",)) -> list[Sample]:
    """Parse the lines of a page whose metrics begin with one of `names`; a line that is no sample is left out.

    Without the comments, which name the types: by those the parser would rename Triton's counters.
    """
    lines = [line for line in text.splitlines() if line.startswith(names)]
    try:
        return _samples("\n".join(lines))
    except ValueError:
        return [sample for line in lines for sample in _samples_of_line(line)]


def _samples(text: str) -> list[Sample]:
    from prometheus_client.parser import text_string_to_metric_families

    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def _samples_of_line(line: str) -> list[Sample]:
    try:
        return _samples(line)
    except ValueError:
        return []


def core_metrics(samples: Iterable[Sample]) -> list[CoreMetrics]:
    """Return the core models of a page, sorted by name."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for sample in samples:
        family, kind = _place(sample)
        if kind is not None:
            found.setdefault(_identity(sample), {}).setdefault(family, {})[kind] = sample.value
    return [
        CoreMetrics(model=model, version=version, families=_ordered(families))
        for (model, version), families in sorted(found.items())
    ]


def _ordered(families: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Sort families by CORE_LABELS, because a page has no fixed order; buckets keep their order."""
    gauges = {name: dict(sorted(families[name].items())) for name in CORE_LABELS if name in families}
    return gauges | {name: dict(families[name]) for name in LENGTHS if name in families}


def _place(sample: Sample) -> tuple[str, str | None]:
    """Return the family of a core model's sample, and which of its values it is, or None for other samples."""
    family, _, part = sample.name.rpartition("_")
    if family not in LENGTHS:
        return sample.name, sample.labels.get(CORE_LABELS.get(sample.name, ""))
    return family, f"le {sample.labels['le']}" if part == "bucket" and "le" in sample.labels else part


def model_metrics(samples: Iterable[Sample]) -> list[ModelMetrics]:
    """Return every model whose requests Triton counts, sorted by name."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for sample in samples:
        if sample.name.startswith(_INFERENCE) and "model" in sample.labels:
            values, name = found.setdefault(_identity(sample), {}), sample.name.removeprefix(_INFERENCE)
            values[name] = values.get(name, 0) + sample.value
    return [
        ModelMetrics(model=model, version=version, values=values) for (model, version), values in sorted(found.items())
    ]


def gpu_metrics(samples: Iterable[Sample]) -> list[GpuMetrics]:
    """Return the GPUs of a page, sorted by UUID."""
    found: dict[str, dict[str, float]] = {}
    for sample in samples:
        if sample.name.startswith(_GPU) and "gpu_uuid" in sample.labels:
            found.setdefault(sample.labels["gpu_uuid"], {})[sample.name.removeprefix(_GPU)] = sample.value
    return [GpuMetrics(uuid=uuid, values=values) for uuid, values in sorted(found.items())]


def kv_blocks(text: str, model: str) -> dict[str, int]:
    """Return the KV cache gauges of the core model `model`, else of the first one, or {} when there are none."""
    found = core_metrics(parse(text))
    chosen = next((each for each in found if each.model == model), found[0] if found else None)
    gauges = {} if chosen is None else chosen.families.get(KV_BLOCKS, {})
    return {kind: int(value) for kind, value in gauges.items() if kind != "fraction"}


def _identity(sample: Sample) -> tuple[str, str]:
    return sample.labels.get("model", ""), sample.labels.get("version", "")

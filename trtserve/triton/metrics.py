"""Triton's metrics page: Prometheus' text format, and the families of the core model and of Triton itself.

Source of the families: section 8 of the reference of clients and benchmarks; `nv_trtserve_tokens_total` is ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

CORE_LABELS: Mapping[str, str] = {
    "nv_trt_llm_request_metrics": "request_type",
    "nv_trt_llm_runtime_memory_metrics": "memory_type",
    "nv_trt_llm_kv_cache_block_metrics": "kv_cache_block_type",
    "nv_trt_llm_inflight_batcher_metrics": "inflight_batcher_specific_metric",
    "nv_trt_llm_v1_metrics": "v1_specific_metric",
    "nv_trt_llm_disaggregated_serving_metrics": "disaggregated_serving_type",
    "nv_trt_llm_general_metrics": "general_type",
    "nv_trtserve_tokens_total": "token_type",
}
"""Family of a core model → the label that tells its values apart."""

LENGTHS = ("nv_llm_input_token_len", "nv_llm_output_token_len")
"""Histograms of a core model: tokens of prompts and of answers, one observation for each finished request."""

REQUESTS = "nv_trt_llm_request_metrics"
KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
GENERAL = "nv_trt_llm_general_metrics"
TOKENS = "nv_trtserve_tokens_total"

_INFERENCE = "nv_inference_"
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One line of the page."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CoreMetrics:
    """What one core model reports: family → value of its label → number.

    Of LENGTHS: `count` of the requests, `sum` of their tokens, and `le N`, the requests of N tokens or fewer.
    """

    model: str
    version: str
    families: Mapping[str, Mapping[str, float]]

    def value(self, family: str, kind: str) -> float | None:
        """One number; None when the model does not report it."""
        return self.families.get(family, {}).get(kind)


@dataclass(frozen=True, kw_only=True)
class ModelMetrics:
    """What Triton counts for one model: its `nv_inference_…` families without that prefix, summed over other labels."""

    model: str
    version: str
    values: Mapping[str, float]

    def mean_ms(self, duration: str) -> float | None:
        """Mean milliseconds per successful request of the cumulative `duration`; None before the first request."""
        requests, total = self.values.get("request_success"), self.values.get(duration)
        return total / requests / 1000 if requests and total is not None else None


def parse(text: str) -> list[Sample]:
    """The samples of a page; lines that are none are passed over."""
    samples = []
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.fullmatch(line.strip())
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        labels = {name: _unescaped(content) for name, content in _LABEL.findall(match["labels"] or "")}
        samples.append(Sample(name=match["name"], value=value, labels=labels))
    return samples


def core_metrics(samples: Iterable[Sample]) -> list[CoreMetrics]:
    """The core models of a page by name; those of release profiles without a family lack it."""
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
    """The families in the order of CORE_LABELS, which a page has in none; buckets stay in theirs."""
    gauges = {name: dict(sorted(families[name].items())) for name in CORE_LABELS if name in families}
    return gauges | {name: dict(families[name]) for name in LENGTHS if name in families}


def _place(sample: Sample) -> tuple[str, str | None]:
    """The core model's family that a sample belongs to, and which of its values it is; None for other samples."""
    family, _, part = sample.name.rpartition("_")
    if family not in LENGTHS:
        return sample.name, sample.labels.get(CORE_LABELS.get(sample.name, ""))
    return family, f"le {sample.labels['le']}" if part == "bucket" and "le" in sample.labels else part


def model_metrics(samples: Iterable[Sample]) -> list[ModelMetrics]:
    """Every model that Triton counts requests of, by name."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for sample in samples:
        if sample.name.startswith(_INFERENCE) and "model" in sample.labels:
            values, name = found.setdefault(_identity(sample), {}), sample.name.removeprefix(_INFERENCE)
            values[name] = values.get(name, 0) + sample.value
    return [
        ModelMetrics(model=model, version=version, values=values) for (model, version), values in sorted(found.items())
    ]


def kv_blocks(text: str, model: str) -> dict[str, int]:
    """Gauges of the KV cache of the core model `model`, or of the only one; {} when the page has none."""
    found = core_metrics(parse(text))
    chosen = next((each for each in found if each.model == model), found[0] if found else None)
    gauges = {} if chosen is None else chosen.families.get(KV_BLOCKS, {})
    return {kind: int(value) for kind, value in gauges.items() if kind != "fraction"}


def _identity(sample: Sample) -> tuple[str, str]:
    return sample.labels.get("model", ""), sample.labels.get("version", "")


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], text)

"""What a server shows of itself: Triton's metrics page and the heartbeats of its executors.

The page has Prometheus' text format. Names with `trtserve` are trtserve's own; the others are NVIDIA's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtserve.errors import ArtifactError
from trtserve.files import read_as
from trtserve.programs.shared.run_folder import HEARTBEATS, STOPPED

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
    values: Mapping[str, float]  # the `nv_inference_…` families without that prefix, summed over other labels

    def mean_ms(self, duration: str) -> float | None:
        """Return mean milliseconds per successful request of a cumulative `duration`, or None before the first."""
        requests, total = self.values.get("request_success"), self.values.get(duration)
        return total / requests / 1000 if requests and total is not None else None


@dataclass(frozen=True, kw_only=True)
class GpuMetrics:
    uuid: str
    values: Mapping[str, float]
    """The `nv_gpu_…` families without that prefix: `utilization` (0 … 1), `memory_used_bytes` and others."""


def parse(text: str, names: tuple[str, ...] = ("nv_",)) -> list[Sample]:
    """Parse the lines of a page whose metrics begin with one of `names`; a line that is not a sample is left out.

    Without the comments, which name the types: by those the parser would rename Triton's counters.
    """
    from prometheus_client.parser import text_string_to_metric_families

    def samples(part: str) -> list[Sample]:
        return [sample for family in text_string_to_metric_families(part) for sample in family.samples]

    lines = [line for line in text.splitlines() if line.startswith(names)]
    try:
        return samples("\n".join(lines))
    except ValueError:
        found = []
        for line in lines:
            with suppress(ValueError):
                found += samples(line)
        return found


def core_metrics(samples: Iterable[Sample]) -> list[CoreMetrics]:
    """Return the core models of a page, sorted by name."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for sample in samples:
        family, kind = _place(sample)
        if kind is not None:
            found.setdefault(_identity(sample), {}).setdefault(family, {})[kind] = sample.value
    # A page has no fixed order; buckets keep theirs.
    return [
        CoreMetrics(
            model=model,
            version=version,
            families={
                **{name: dict(sorted(families[name].items())) for name in CORE_LABELS if name in families},
                **{name: families[name] for name in LENGTHS if name in families},
            },
        )
        for (model, version), families in sorted(found.items())
    ]


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


_SILENT = 15.0
_STALLED = 60.0


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The newest record of one executor, as `programs/shared/run_folder.py` writes it."""

    model: str
    pid: int
    time: float  # when it was written, in seconds of the monotonic clock; an executor writes twice a second
    moved: float  # when the executor last made a step or had nothing to do
    open_requests: int
    failure: str | None  # why the executor has stopped working for good

    @property
    def ailment(self) -> str:
        """What is wrong with an executor whose process lives, or empty."""
        silent, stalled = (time.monotonic() - moment for moment in (self.time, self.moved))
        if self.failure is not None:
            return f"its executor has stopped working: {self.failure}"
        if silent > _SILENT:
            return f"its process {self.pid} has shown no sign of life for {silent:.0f} s"
        if stalled > _STALLED:
            return f"its executor has made no step for {stalled:.0f} s, with {self.open_requests} open requests"
        return ""


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Return the heartbeats of a server's executors; none before they have loaded, and for NVIDIA's backends."""
    found = []
    for path in sorted(folder.glob(HEARTBEATS)):
        try:
            beat = read_as(path, Heartbeat, "a heartbeat", tolerant=True)
        except (FileNotFoundError, ArtifactError):  # it was removed, or is being written for the first time
            continue
        failure = None if beat.failure is None else beat.failure.removeprefix(f"{STOPPED}: ")
        found.append(replace(beat, failure=failure))
    return found

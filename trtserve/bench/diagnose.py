"""Where the time between an engine and its users goes: the same requests in process, to the core model and as asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtserve.bench.report import BenchReport
from trtserve.client.tensors import CORE_MODEL
from trtserve.errors import ArtifactError, RepositoryError
from trtserve.files import read_json_object


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A part of the difference between the engine alone and what was measured."""

    name: str
    first_token_ms: float | None
    """Time that it adds to the first token."""
    throughput: float | None
    """Factor on output tokens per second; 1 costs nothing."""
    reason: str


def diagnose(in_process: BenchReport, core: BenchReport, measured: BenchReport, repository: Path | None) -> list[Gap]:
    """Return the gaps from the engine in this process to what was measured, largest parts named."""
    gaps = [_gap("Triton and the protocol (in process → tensorrt_llm)", in_process, core, "the same engine and tokens")]
    if measured.protocol == "openai":
        gaps.append(_gap("OpenAI's API (tensorrt_llm → /v1)", core, measured, "HTTP, tokenising and the gateway"))
    elif measured.model != core.model:
        gaps.append(
            _gap(f"text models (tensorrt_llm → {measured.model})", core, measured, "tokenising and BLS or ensemble")
        )
    if core.queue_wait_ms is not None:
        gaps.append(
            Gap(name="Triton's queue", first_token_ms=core.queue_wait_ms, throughput=None, reason="mean of its metrics")
        )
    if measured.calibration is not None:
        found = measured.calibration
        share = measured.statistics.requests_per_second / found.answers_per_second
        gaps.append(
            Gap(
                name="the client",
                first_token_ms=found.floor_p50_ms,
                throughput=None,
                reason=f"echo server over {found.protocol}; the run used {share:.0%} of the client's rate",
            )
        )
    if repository is not None:
        gaps += [
            Gap(name=name, first_token_ms=None, throughput=None, reason=reason)
            for name, reason in _settings(repository, measured)
        ]
    return gaps


def _gap(name: str, before: BenchReport, after: BenchReport, reason: str) -> Gap:
    first, second = (each.statistics.time_to_first_token_ms.p50 for each in (before, after))
    rates = before.statistics.output_tokens_per_second, after.statistics.output_tokens_per_second
    return Gap(
        name=name,
        first_token_ms=None if first is None or second is None else second - first,
        throughput=rates[1] / rates[0] if rates[0] else None,
        reason=reason,
    )


def _settings(repository: Path, measured: BenchReport) -> list[tuple[str, str]]:
    """Return settings of the repository and the engine that cost throughput."""
    found = []
    try:
        build = read_json_object(repository / CORE_MODEL / "1" / "config.json").get("build_config", {})
    except (ArtifactError, RepositoryError, FileNotFoundError):
        build = {}
    asked = measured.spec.get("concurrency") or round(measured.statistics.requests_in_flight)
    most = build.get("max_batch_size")
    if most is not None and asked > most:
        found.append(("batch size", f"{asked} requests in flight, but the engine batches {most} (--max-batch-size)"))
    found += [
        ("logits", f"the engine was built with {flag}, which copies logits at every step")
        for flag in ("gather_context_logits", "gather_generation_logits")
        if build.get(flag)
    ]
    # The core model batches within one instance, the ensemble does not use the BLS model, and OpenAI's API none.
    used = {"preprocessing", "postprocessing", "tensorrt_llm_bls", measured.model}
    used -= {"tensorrt_llm_bls"} if measured.model == "ensemble" else set()
    used = set() if measured.model == CORE_MODEL or measured.protocol == "openai" else used
    for path in sorted(repository.glob("*/config.pbtxt")):
        model, text = path.parent.name, path.read_text(encoding="utf-8")
        instances = _count(text)
        if model in used and 0 < instances < asked:
            found.append((f"instances of {model}", f"{instances} for {asked} requests in flight"))
        if model == CORE_MODEL and "decoupled: true" not in text.replace("decoupled:true", "decoupled: true"):
            found.append(("decoupled", "the core model is not decoupled: no answer is streamed"))
    return found


def _count(text: str) -> int:
    """Return the number of instances in a config.pbtxt, or 0 where it has none (an ensemble)."""
    _, found, rest = text.partition("instance_group")
    words: list[Any] = rest.replace(":", " ").split()
    return int(words[words.index("count") + 1]) if found and "count" in words else 0

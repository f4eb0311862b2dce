"""Compare results: two servers, with the interval of each difference, or an engine alone and what its users get.

Requests of one run tell how exact that run is, not how far two runs of one server differ. Only several runs tell that:
with them the interval is that of Student's t over the means of the runs, in pairs when the runs of both sides took
turns (which cancels slow drift), else as Welch has it. One run on each side is given an allowance for drift instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from statistics import fmean, variance

from trtserve.artifacts.engine_config import BuildConfig, EngineConfig
from trtserve.bench.records import RequestRecord, first_token_ms, latency_ms, per_token_ms
from trtserve.bench.report import LATENCY, TPOT, TTFT, BenchReport
from trtserve.bench.statistics import FEWEST, Interval, mean_interval, t_quantile
from trtserve.client.tensors import CORE_MODEL
from trtserve.errors import ArtifactError, UsageError
from trtserve.files import read_json_object
from trtserve.repository.config import read_config

DRIFT = 0.05  # how far the means of two runs of one server may differ, as a part of the mean, where it was not measured
_LEVEL = 0.95
_Measure = Callable[[RequestRecord], float | None]
_MEASURES: dict[str, _Measure] = {
    f"{TTFT} (ms)": first_token_ms,
    f"{TPOT} (ms)": per_token_ms,
    f"{LATENCY} (ms)": latency_ms,
}
_start = attrgetter("started")
_EACH = 1 - (1 - _LEVEL) / len(_MEASURES)  # several intervals are looked at together (Bonferroni)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One figure of two results; larger is worse."""

    name: str
    before: float
    after: float
    relative: float  # (after - before) / before
    interval: Interval | None
    """Of `relative`; None: not enough data. The intervals of all figures hold together with 95 %."""
    paired: bool  # whether the same requests, or runs that took turns, were compared one by one
    pairs: int  # of runs where there are several, else of requests; without pairs the smaller number of both sides
    runs: tuple[int, int]  # runs before and after

    def worse_than(self, allowed: float) -> bool:
        """Return whether the result is worse by more than `allowed`, beyond the uncertainty."""
        return self.interval is not None and self.interval[0] > allowed

    @property
    def better(self) -> bool:
        """Whether the result is better beyond the uncertainty."""
        return self.interval is not None and self.interval[1] < 0


def compare(before: Sequence[BenchReport], after: Sequence[BenchReport], *, drift: float = DRIFT) -> list[Difference]:
    """Return the differences of the mean times between the runs of two servers.

    `drift` is used when both sides have one run. Raises UsageError if nothing can be compared.
    """
    if len(before) == len(after) == 1:
        differences = [_of_requests(name, measure, before[0], after[0], drift) for name, measure in _MEASURES.items()]
    elif min(len(before), len(after)) > 1:
        sides = sorted(before, key=_start), sorted(after, key=_start)
        differences = [_of_runs(name, measure, *sides) for name, measure in _MEASURES.items()]
    else:
        raise UsageError(
            f"{len(before)} runs before and {len(after)} after: one run cannot tell how far runs differ.",
            hint="Give one run on each side, or at least two on each.",
        )
    found = [difference for difference in differences if difference is not None]
    if not found:
        raise UsageError("The results have no completed answers in common to compare.")
    return found


def take_turns(before: Sequence[BenchReport], after: Sequence[BenchReport]) -> bool:
    """Return whether the i-th runs of both sides were measured before the next ones, in whatever order."""
    first, second = sorted(map(_start, before)), sorted(map(_start, after))
    turns = [sorted(pair) for pair in zip(first, second, strict=False)]
    return len(first) == len(second) and all(one[1] < next_one[0] for one, next_one in pairwise(turns))


def failed_share(reports: Sequence[BenchReport]) -> float:
    """Return failed requests as a part of those sent."""
    counts = [each.statistics.counts for each in reports]
    return sum(each.failed for each in counts) / max(1, sum(each.sent for each in counts))


def _of_requests(
    name: str, measure: _Measure, before: BenchReport, after: BenchReport, drift: float
) -> Difference | None:
    """Compare two runs, request by request if both sent the same ones."""
    first, second = _values(before, measure), _values(after, measure)
    if not first or not second:
        return None
    shared = sorted(first.keys() & second.keys(), key=lambda index: first[index][0])
    paired = before.prompts_sha256 == after.prompts_sha256 and len(shared) >= min(FEWEST, len(first), len(second))
    if paired:
        base = fmean(first[index][1] for index in shared)
        changes = [second[index][1] - first[index][1] for index in shared]
        change, interval = fmean(changes), mean_interval(changes, level=_EACH)
    else:
        ordered = [[value for _, value in sorted(each.values())] for each in (first, second)]
        base, change, interval = fmean(ordered[0]), fmean(ordered[1]) - fmean(ordered[0]), _unpaired(*ordered)
    return _difference(
        name,
        base,
        change,
        None if interval is None else (interval[0] - drift * base, interval[1] + drift * base),
        paired=paired,
        pairs=len(shared) if paired else min(len(first), len(second)),
        runs=(1, 1),
    )


def _of_runs(
    name: str, measure: _Measure, before: Sequence[BenchReport], after: Sequence[BenchReport]
) -> Difference | None:
    """Compare the means of the runs of two sides, which are in order of time."""
    found = ([_values(each, measure).values() for each in side] for side in (before, after))
    first, second = ([fmean(value for _, value in values) for values in side if values] for side in found)
    if len(first) < len(before) or len(second) < len(after):
        return None
    base, change, paired = fmean(first), fmean(second) - fmean(first), take_turns(before, after)
    if paired:
        changes = [new - old for old, new in zip(first, second, strict=True)]
        error, degrees = math.sqrt(variance(changes) / len(changes)), len(changes) - 1
    else:
        parts = [(variance(side) / len(side), len(side) - 1) for side in (first, second)]
        error = math.sqrt(sum(part for part, _ in parts))
        spread = sum(part**2 / number for part, number in parts)
        degrees = int(error**4 / spread) if spread else min(number for _, number in parts)
    half = t_quantile((1 + _EACH) / 2, degrees) * error
    return _difference(
        name,
        base,
        change,
        (change - half, change + half),
        paired=paired,
        pairs=min(len(first), len(second)),
        runs=(len(first), len(second)),
    )


def _difference(
    name: str, base: float, change: float, interval: Interval | None, *, paired: bool, pairs: int, runs: tuple[int, int]
) -> Difference | None:
    if base <= 0:
        return None
    return Difference(
        name=name,
        before=base,
        after=base + change,
        relative=change / base,
        interval=None if interval is None else (interval[0] / base, interval[1] / base),
        paired=paired,
        pairs=pairs,
        runs=runs,
    )


def _values(report: BenchReport, measure: _Measure) -> dict[int, tuple[int, float]]:
    """Return index → time of the schedule and value, for completed answers."""
    found = ((each, measure(each)) for each in report.records if each.status == "completed")
    return {each.index: (each.intended_ns, value) for each, value in found if value is not None}


def _unpaired(before: Sequence[float], after: Sequence[float]) -> Interval | None:
    first, second = mean_interval(before, level=_EACH), mean_interval(after, level=_EACH)
    if first is None or second is None:
        return None
    difference = sum(second) / 2 - sum(first) / 2
    half = math.hypot((first[1] - first[0]) / 2, (second[1] - second[0]) / 2)
    return difference - half, difference + half


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A part of the difference between the engine alone and what was measured."""

    name: str
    reason: str
    first_token_ms: float | None = None  # time that it adds to the first token
    throughput: float | None = None  # factor on output tokens per second; 1 costs nothing


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
        gaps.append(Gap(name="Triton's queue", first_token_ms=core.queue_wait_ms, reason="mean of its metrics"))
    if measured.calibration is not None:
        found = measured.calibration
        share = measured.statistics.requests_per_second / found.answers_per_second
        reason = f"echo server over {found.protocol}; the run used {share:.0%} of the client's rate"
        gaps.append(Gap(name="the client", first_token_ms=found.floor_p50_ms, reason=reason))
    return gaps if repository is None else [*gaps, *_settings(repository, measured)]


def _gap(name: str, before: BenchReport, after: BenchReport, reason: str) -> Gap:
    first, second = (each.statistics.time_to_first_token_ms.p50 for each in (before, after))
    rates = before.statistics.output_tokens_per_second, after.statistics.output_tokens_per_second
    return Gap(
        name=name,
        first_token_ms=None if first is None or second is None else second - first,
        throughput=rates[1] / rates[0] if rates[0] else None,
        reason=reason,
    )


def _settings(repository: Path, measured: BenchReport) -> list[Gap]:
    """Return settings of the repository and the engine that cost throughput."""
    build = BuildConfig()
    with suppress(ArtifactError, FileNotFoundError):
        path = repository / CORE_MODEL / "1" / "config.json"
        build = EngineConfig.of(read_json_object(path), path, ArtifactError).build
    found = []
    asked = measured.spec.get("concurrency") or round(measured.statistics.requests_in_flight)
    if 0 < build.max_batch_size < asked:
        reason = f"{asked} requests in flight, but the engine batches {build.max_batch_size} (--max-batch-size)"
        found.append(Gap(name="batch size", reason=reason))
    found += [
        Gap(name="logits", reason=f"the engine was built with {flag}, which copies logits at every step")
        for flag in ("gather_context_logits", "gather_generation_logits")
        if getattr(build, flag)
    ]
    # The core model batches within one instance, the ensemble does not use the BLS model, and OpenAI's API none.
    used = {"preprocessing", "postprocessing", "tensorrt_llm_bls", measured.model}
    used -= {"tensorrt_llm_bls"} if measured.model == "ensemble" else set()
    used = set() if measured.model == CORE_MODEL or measured.protocol == "openai" else used
    for path in sorted(repository.glob("*/config.pbtxt")):
        model, config = path.parent.name, read_config(path)
        instances = sum(group.count for group in config.instance_group)  # 0: an ensemble
        if model in used and 0 < instances < asked:
            found.append(Gap(name=f"instances of {model}", reason=f"{instances} for {asked} requests in flight"))
        if model == CORE_MODEL and not config.model_transaction_policy.decoupled:
            found.append(Gap(name="decoupled", reason="the core model is not decoupled: no answer is streamed"))
    return found

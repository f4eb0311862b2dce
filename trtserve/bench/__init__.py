"""The benchmark of a served core model: traffic and arrivals in, a report out."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from trtserve import __version__
from trtserve.bench.arrivals import schedule
from trtserve.bench.load import Load, Outcome, run_load
from trtserve.bench.report import Report, notes_on
from trtserve.bench.statistics import compute
from trtserve.bench.traffic import (
    Limits,
    Traffic,
    limits_of_repository,
    override_limits,
    precision_of_repository,
    token_norm_dist,
)
from trtserve.errors import RequestError
from trtserve.progress import SILENT, Progress
from trtserve.specs import BenchSpec
from trtserve.triton.client import Endpoint, GrpcClient, ModelDescription

CLOSED_LOOP_CONCURRENCY = 8
DESCRIBE_TIMEOUT = 10.0

__all__ = ["Plan", "Report", "plan_benchmark", "run_benchmark"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a benchmark will send, and what must be said about it."""

    limits: Limits
    traffic: Traffic
    offsets: Sequence[float] | None
    concurrency: int | None
    notes: tuple[str, ...]


def plan_benchmark(spec: BenchSpec, endpoint: Endpoint) -> Plan:
    """Make the traffic of `spec` within the limits of the engine behind `endpoint`; sends nothing.

    Limits come from the recorded repository of the server, or from `spec`; UsageError without a vocabulary size.
    """
    known = limits_of_repository(endpoint.repository, spec.model) if endpoint.repository is not None else Limits()
    limits = override_limits(known, spec)
    traffic = token_norm_dist(spec, limits)
    offsets, concurrency = None, spec.concurrency
    if spec.request_rate is None:
        concurrency = concurrency or CLOSED_LOOP_CONCURRENCY
    else:
        offsets = schedule(spec.arrivals, rate=spec.request_rate, count=spec.num_requests, seed=spec.seed)
    notes = (*_clip_notes(traffic, limits), *_warmup_notes(spec))
    return Plan(limits=limits, traffic=traffic, offsets=offsets, concurrency=concurrency, notes=notes)


def run_benchmark(spec: BenchSpec, endpoint: Endpoint, *, progress: Progress = SILENT) -> Report:
    """Measure the core model behind `endpoint`.

    Failed requests are part of the report, not an exception; so is an interrupt (`report.interrupted`).
    Errors: ServerUnreachableError, RequestError (unknown model, every warm-up request refused), UsageError (no limits).
    """
    with closing(GrpcClient(endpoint, timeout=DESCRIBE_TIMEOUT)) as client:
        model = _core_model(client.describe(spec.model))
    plan = plan_benchmark(spec, endpoint)
    started = datetime.datetime.now(datetime.timezone.utc).isoformat()
    outcome = _measure(spec, endpoint, model, plan, progress)
    statistics = compute(outcome.records)
    return Report(
        spec=replace(spec, concurrency=plan.concurrency),
        endpoint=endpoint.grpc,
        model=endpoint.model,
        precision={} if endpoint.repository is None else precision_of_repository(endpoint.repository, spec.model),
        streaming=model.decoupled,
        statistics=statistics,
        limits={name: getattr(plan.limits, name) for name in ("vocab_size", "max_input_len", "max_seq_len")},
        prompts=_hash(plan.traffic),
        started=started,
        versions={"trtserve": __version__, "grpcio": importlib.metadata.version("grpcio")},
        interrupted=outcome.interrupted,
        timed_out=outcome.timed_out,
        notes=(*plan.notes, *notes_on(statistics), *_time_notes(spec, outcome)),
        records=tuple(outcome.records),
    )


def _measure(spec: BenchSpec, endpoint: Endpoint, model: ModelDescription, plan: Plan, progress: Progress) -> Outcome:
    requests = plan.traffic.requests
    warmup = tuple(requests[index % len(requests)] for index in range(spec.warmup_requests))
    load = Load(
        endpoint=endpoint,
        model=model,
        requests=requests,
        warmup=warmup,
        offsets=plan.offsets,
        concurrency=plan.concurrency,
        timeout=spec.timeout,
    )
    served = "" if endpoint.model is None else f" of {endpoint.model}"
    progress.step(f"Benchmark of {model.name!r}{served} at {endpoint.grpc}: {pace(spec, plan)}")
    with progress.task(f"Sending {len(warmup)} + {len(requests)} requests", total=len(requests) + len(warmup)) as task:
        return run_load(load, on_end=lambda: task.advance(1))


def pace(spec: BenchSpec, plan: Plan) -> str:
    """How fast requests are sent, in words."""
    if spec.request_rate is None:
        return f"closed loop, concurrency {plan.concurrency}"
    cap = f"concurrency {plan.concurrency} at most" if plan.concurrency else "no cap on concurrency"
    return f"{spec.request_rate:g} requests/s, {spec.arrivals}, {cap}"


def _core_model(model: ModelDescription) -> ModelDescription:
    if "input_ids" not in model.inputs:
        raise RequestError(
            f"The model {model.name!r} has no input 'input_ids'; this benchmark sends token ids.",
            hint="Name the core model of an engine with --model (`tensorrt_llm` by default); the LLM API's takes text "
            "alone.",
        )
    return model


def _clip_notes(traffic: Traffic, limits: Limits) -> list[str]:
    notes = []
    if traffic.clipped_inputs:
        bound = f"max_input_len {limits.max_input_len}, max_seq_len {limits.max_seq_len}"
        notes.append(f"{traffic.clipped_inputs} prompts were cut to the engine's limits ({bound}).")
    if traffic.clipped_outputs:
        notes.append(
            f"{traffic.clipped_outputs} answers were shortened to the engine's max_seq_len {limits.max_seq_len}."
        )
    if limits.max_seq_len is None:
        notes.append("The engine's max_seq_len is not known here: lengths are not held to it.")
    return notes


def _warmup_notes(spec: BenchSpec) -> list[str]:
    if not spec.warmup_requests:
        return ["No warm-up: the first requests carry the server's first-use costs."]
    return [f"{spec.warmup_requests} warm-up requests go before the measured window and are not counted."]


def _time_notes(spec: BenchSpec, outcome: Outcome) -> list[str]:
    if not outcome.timed_out:
        return []
    return [f"The time limit ended the run (--timeout {spec.timeout:g}): the figures cover what had been sent."]


def _hash(traffic: Traffic) -> str:
    digest = hashlib.sha256()
    for request in traffic.requests:
        digest.update(request.token_ids.tobytes() + request.output_len.to_bytes(4, "little"))
    return digest.hexdigest()

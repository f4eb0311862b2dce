"""The benchmark of a served model: traffic and arrivals in, a report out."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
from contextlib import closing
from dataclasses import replace

from trtserve import __version__
from trtserve.bench.answers import count_answers
from trtserve.bench.load import Load, Outcome, run_load
from trtserve.bench.plan import Plan, Target, find_target, make_plan, pace, plan_benchmark
from trtserve.bench.report import Report, notes_on
from trtserve.bench.statistics import compute
from trtserve.bench.traffic import Traffic, precision_of_repository
from trtserve.progress import SILENT, Progress
from trtserve.specs import BenchSpec
from trtserve.triton.client import Endpoint, GrpcClient, ModelDescription

__all__ = ["Plan", "Report", "pace", "plan_benchmark", "run_benchmark"]


def run_benchmark(spec: BenchSpec, endpoint: Endpoint, *, progress: Progress = SILENT) -> Report:
    """Measure a model behind `endpoint`: the core model with token ids, the others with text.

    Failed requests are part of the report, not an exception; so is an interrupt (`report.interrupted`).
    Errors: ServerUnreachableError, RequestError (unknown model, one that takes no prompts, every warm-up request
    refused), UsageError (no limits, no tokenizer, a dataset that is none).
    """
    with closing(GrpcClient(endpoint, timeout=endpoint.connect_timeout)) as client:
        model = client.describe(spec.model)
        target = find_target(spec, endpoint, client, model)
    plan = make_plan(spec, endpoint, target)
    started = datetime.datetime.now(datetime.timezone.utc).isoformat()
    outcome = _measure(spec, endpoint, model, plan, progress)
    counted_by, notes = _count(outcome, plan, target)
    statistics = compute(outcome.records)
    return Report(
        spec=replace(spec, concurrency=plan.concurrency),
        endpoint=endpoint.grpc,
        model=endpoint.model,
        precision={} if endpoint.repository is None else precision_of_repository(endpoint.repository, target.core),
        streaming=model.decoupled,
        tokens_counted_by=counted_by,
        statistics=statistics,
        limits={name: getattr(plan.limits, name) for name in ("vocab_size", "max_input_len", "max_seq_len")},
        prompts=_hash(plan.traffic),
        started=started,
        versions={"trtserve": __version__, "grpcio": importlib.metadata.version("grpcio")},
        interrupted=outcome.interrupted,
        timed_out=outcome.timed_out,
        notes=(*plan.notes, *notes, *notes_on(statistics), *_time_notes(spec, outcome)),
        records=tuple(outcome.records),
    )


def _count(outcome: Outcome, plan: Plan, target: Target) -> tuple[str, list[str]]:
    """Who counted the output tokens, and what must be said of it; fills the records of a text model."""
    if not target.text or target.model is None or target.files is None:
        return "output_ids", []
    counted = count_answers(outcome.records, plan.traffic.requests, target.model, target.files)
    return counted.by, counted.notes(target.files)


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
        may_be_empty=not spec.ignore_eos,
    )
    served = "" if endpoint.model is None else f" of {endpoint.model}"
    progress.step(f"Benchmark of {model.name!r}{served} at {endpoint.grpc}: {pace(spec, plan)}")
    with progress.task(f"Sending {len(warmup)} + {len(requests)} requests", total=len(requests) + len(warmup)) as task:
        return run_load(load, on_end=lambda: task.advance(1))


def _time_notes(spec: BenchSpec, outcome: Outcome) -> list[str]:
    if not outcome.timed_out:
        return []
    return [f"The time limit ended the run (--timeout {spec.timeout:g}): the figures cover what had been sent."]


def _hash(traffic: Traffic) -> str:
    digest = hashlib.sha256()
    for request in traffic.requests:
        digest.update(request.token_ids.tobytes() + request.output_len.to_bytes(4, "little"))
    return digest.hexdigest()

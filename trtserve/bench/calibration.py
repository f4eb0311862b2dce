"""Measure the client itself before a run, on the built-in echo server and over the same protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trtserve.bench.echo_server import Echo, Spoken, running_echo
from trtserve.bench.messages import takes_text
from trtserve.bench.processes import run_load
from trtserve.bench.records import RequestRecord, TrafficRequest
from trtserve.bench.statistics import percentile
from trtserve.bench.transport import LoadTarget
from trtserve.bench.worker import Load

_ANSWERS = 400
_IN_FLIGHT = 16
_PACED = 60
_PACE = 200.0
_MOST_CHUNKS = 64


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the client can do on this machine, with the echo server on the same machine."""

    protocol: str
    workers: int
    responses_per_answer: int
    answers_per_second: float
    """Highest rate of answers with this many responses."""
    dispatch_p50_ms: float
    """How late requests are sent at a moderate rate."""
    dispatch_p99_ms: float
    dispatch_max_ms: float
    floor_p50_ms: float
    """From the intended send to the first response of a server that needs no time."""
    floor_p99_ms: float

    def capacity(self, responses: float) -> float:
        """Return the highest rate of answers with this many responses, a response costing as much as a request."""
        return self.answers_per_second * (1 + self.responses_per_answer) / (1 + max(1.0, responses))


def calibrate(
    target: LoadTarget, requests: Sequence[TrafficRequest], *, workers: int, concurrency: int | None
) -> Calibration | None:
    """Return the limits of the client for requests like these, or None for a target without a protocol."""
    if target.protocol == "in-process":
        return None
    mean = sum(request.output_len for request in requests) / len(requests)
    chunks = min(_MOST_CHUNKS, max(1, round(mean))) if target.streams else 1
    sample = [replace(request, session=None, cancel_after=None) for request in requests[:_ANSWERS]]
    sample = (sample * (1 + _ANSWERS // len(sample)))[:_ANSWERS]
    with running_echo(Echo(spoken=_spoken(target), chunks=chunks, text=takes_text(target.model))) as port:
        echo = _at(target, port)
        offsets = [index / _PACE for index in range(_PACED)]
        paced = _records(Load(target=echo, requests=sample[:_PACED], warmup=sample[:5], offsets=offsets, timeout=30))
        in_flight = max(workers, min(concurrency or _IN_FLIGHT, _IN_FLIGHT * workers))
        full = Load(target=echo, requests=sample, warmup=sample[:workers], concurrency=in_flight, timeout=30)
        fast = _records(full, workers=workers)
    delays = sorted((record.sent_ns or 0) - record.intended_ns for record in paced)
    firsts = sorted(_first_ns(record) - record.intended_ns for record in paced)
    begin, end = min(record.sent_ns or 0 for record in fast), max(record.ended_ns for record in fast)
    return Calibration(
        protocol=_spoken(target),
        workers=workers,
        responses_per_answer=chunks,
        answers_per_second=len(fast) / ((end - begin) / 1e9),
        dispatch_p50_ms=percentile(delays, 0.5) / 1e6,
        dispatch_p99_ms=percentile(delays, 0.99) / 1e6,
        dispatch_max_ms=delays[-1] / 1e6,
        floor_p50_ms=percentile(firsts, 0.5) / 1e6,
        floor_p99_ms=percentile(firsts, 0.99) / 1e6,
    )


def _first_ns(record: RequestRecord) -> int:
    """Return the time of the first response; texts have not been counted here."""
    times = [time for time, _ in record.arrivals] or [each.time_ns for each in record.responses]
    return times[0] if times else record.ended_ns


def _records(load: Load, *, workers: int = 1) -> list[RequestRecord]:
    outcome = run_load(load, workers=workers)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return outcome.records


def _spoken(target: LoadTarget) -> Spoken:
    if target.protocol == "openai":
        return "openai-stream" if target.streams else "openai"
    if target.protocol == "http":
        return "http-stream" if target.streams else "http"
    return "grpc-stream" if target.model.decoupled else "grpc-unary"


def _at(target: LoadTarget, port: int) -> LoadTarget:
    """Return the target moved to a port of this machine."""
    endpoint = replace(target.endpoint, host="127.0.0.1", http_port=port, grpc_port=port, tls=None)
    openai = None if target.openai is None else replace(target.openai, url=f"http://127.0.0.1:{port}/v1")
    return replace(target, endpoint=endpoint, openai=openai)

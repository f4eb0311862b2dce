"""Whether the figures mean what they seem to mean: the verdict of a run, with its reasons.

First of all they must be possible: not faster than the hardware, no more tokens than were generated, times that fit
together.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtserve.bench.monitoring import WorkerHealth
from trtserve.bench.records import Count, Positive, Real, RequestRecord, Whole, first_token_ms
from trtserve.bench.statistics import FEWEST, VALID_DELIVERY, Statistics, mean_interval

# No engine generates a token of one answer faster than this; answers that do were not generated one by one.
_FASTEST_TOKEN_MS = 0.01
# Highest bandwidth and arithmetic of one GPU, rounded up: a bound that holds on every machine.
_GPU_BYTES_PER_SECOND = 8e12
_GPU_OPERATIONS_PER_SECOND = 2e16
# Weights that a CPU's caches could hold say nothing about memory.
_CACHED = 256 * 1024**2
_TOLERANCE = 1.5
_COUNT_TOLERANCE = 0.05
_COUNTER_LAG_NS = 3 * 10**9  # servers refresh their metrics every second or two
_TEXT_TOLERANCE = 0.25
_LITTLE_TOLERANCE = 0.15
_FEWEST_SAMPLES = 10
_WEIGHTS = ("*.bin", "*.safetensors", "*.engine")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What bounds the engine's speed; None where unknown."""

    weight_bytes: Count | None = None  # bytes that every step reads
    bytes_per_second: Positive | None = None
    operations_per_second: Positive | None = None


def find_machine(engine: Path | None, *, gpu: bool) -> Machine:
    """Return the bounds for an engine folder on this machine; the memory of a CPU is measured, which takes 50 ms."""
    if engine is None or not engine.is_dir():
        return Machine()
    size = sum(path.stat().st_size for pattern in _WEIGHTS for path in engine.glob(pattern))
    if gpu:
        ranks = max(1, *(len(list(engine.glob(f"rank*.{suffix}"))) for suffix in ("engine", "safetensors")))
        return Machine(
            weight_bytes=size // ranks,
            bytes_per_second=_GPU_BYTES_PER_SECOND,
            operations_per_second=_GPU_OPERATIONS_PER_SECOND * ranks,
        )
    if size < _CACHED:
        return Machine()
    import numpy as np

    array = np.ones(32 * 1024**2 // 8)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        array.sum()
        best = min(best, time.perf_counter() - began)
    # one core's rate times their number is an upper bound
    return Machine(weight_bytes=size, bytes_per_second=array.nbytes / best * len(os.sched_getaffinity(0)))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the client can do on this machine, with the echo server on the same machine."""

    protocol: str
    workers: Whole
    responses_per_answer: Count
    answers_per_second: Positive  # highest rate of answers with this many responses
    dispatch_p50_ms: Real  # how late requests are sent at a moderate rate
    dispatch_p99_ms: Real
    dispatch_max_ms: Real
    floor_p50_ms: Real  # from the intended send to the first response of a server that needs no time
    floor_p99_ms: Real

    def capacity(self, responses: float) -> float:
        """Return the highest rate of answers with this many responses, a response costing as much as a request."""
        return self.answers_per_second * (1 + self.responses_per_answer) / (1 + max(1.0, responses))


def implausible(
    records: Sequence[RequestRecord],
    *,
    machine: Machine | None = None,
    rows: Sequence[Mapping[str, float]] = (),
    server_tokens: float | None = None,
) -> list[str]:
    """Return what cannot be true about the records.

    `rows` and `server_tokens` were counted during the run, independently of the records.
    """
    machine = machine or Machine()
    completed = [record for record in records if record.status == "completed"]
    return [
        *_too_fast(completed, machine),
        *_wrong_counts(completed, server_tokens),
        *_little(records, rows),
        *_disorder(completed),
    ]


def _too_fast(completed: Sequence[RequestRecord], machine: Machine) -> list[str]:
    streamed = [record for record in completed if record.streamed and len(record.arrivals) >= 4]
    if not streamed:
        return []
    # The mean over an answer: single responses may arrive together.
    step = statistics.median(
        (record.arrivals[-1][0] - record.arrivals[0][0]) / (len(record.arrivals) - 1) / 1e6 for record in streamed
    )
    found = []
    if step < _FASTEST_TOKEN_MS:
        found.append(
            f"Answers arrive all at once: {step * 1000:.1f} µs between responses. They were not generated "
            "token by token; a cache or a proxy may hold them back, or the client read too late to tell them apart."
        )
    if machine.weight_bytes and machine.bytes_per_second:
        least = machine.weight_bytes / machine.bytes_per_second * 1e3
        if step < least / _TOLERANCE:
            found.append(
                f"Faster than memory: {step:.3f} ms per step, but reading {machine.weight_bytes / 1e9:.1f} GB of "
                f"weights takes at least {least:.3f} ms."
            )
    if machine.weight_bytes and machine.operations_per_second:
        # Two operations per parameter and token; a parameter has at most four bytes.
        work = 2 * machine.weight_bytes / 4 / machine.operations_per_second * 1e3
        late = [first - work * record.input_tokens for record in streamed if (first := first_token_ms(record))]
        if late and statistics.median(late) < 0:
            found.append("The first tokens come before the prompts can be processed: a cache must have answered.")
    return found


def _wrong_counts(completed: Sequence[RequestRecord], server_tokens: float | None) -> list[str]:
    found = []
    more = sum(record.output_tokens > record.requested_tokens for record in completed)
    if more:
        found.append(f"{more} answers have more tokens than were asked for: tokens are counted wrongly.")
    both = [record for record in completed if record.server_tokens is not None and record.tokenizer_tokens is not None]
    server = sum(record.server_tokens or 0 for record in both)
    text = sum(record.tokenizer_tokens or 0 for record in both)
    # A text can be split in several ways, and special tokens are not in it.
    if both and server > text * (1 + _TEXT_TOLERANCE) + 2 * len(both):
        found.append(f"The server counts {server} tokens, but its texts have {text}: it counts wrongly.")
    last = max((record.ended_ns for record in completed), default=0)
    settled = sum(tokens for record in completed for time, tokens in record.arrivals if time <= last - _COUNTER_LAG_NS)
    if server_tokens is not None and server_tokens < settled * (1 - _COUNT_TOLERANCE):
        found.append(
            f"The server's own counter grew by {server_tokens:.0f} tokens, but the answers contain at least {settled}."
        )
    return found


def _little(records: Sequence[RequestRecord], rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Compare the requests in flight, which were sampled, with those that the recorded times imply (N = X·R)."""
    sent = [record for record in records if record.sent_ns is not None]
    inside = [row for row in rows if sent and min(r.sent_ns or 0 for r in sent) <= row["time_ns"]]
    inside = [row for row in inside if row["time_ns"] <= max(record.ended_ns for record in sent)]
    if len(inside) < _FEWEST_SAMPLES:
        return []
    sampled = sum(row["in_flight"] for row in inside) / len(inside)
    implied = sum(
        sum((record.sent_ns or 0) <= row["time_ns"] < record.ended_ns for record in sent) for row in inside
    ) / len(inside)
    if abs(sampled - implied) <= _LITTLE_TOLERANCE * max(sampled, implied) + 0.5:
        return []
    apart = f"imply {implied:.1f} requests in flight (N = X·R), but {sampled:.1f} were counted"
    return [f"The recorded times {apart}: the times are wrong."]


def _disorder(completed: Sequence[RequestRecord]) -> list[str]:
    """Look for times that run backwards."""
    wrong = sum(
        record.sent_ns is None
        or not all(
            record.sent_ns <= time <= record.ended_ns for time, _ in (record.arrivals[:1] + record.arrivals[-1:])
        )
        for record in completed
    )
    return [f"{wrong} answers begin before they were asked for, or end before their last token."] if wrong else []


MOST_OF_CAPACITY = 0.8
BUSY = 0.9
LATE_MS = 10.0
LATE_SHARE = 0.05
SLOW_GC_MS = 50.0
STARVED = 0.2
_DRIFT = 0.25
_BACKLOG = 0.1

# Part of the processors that other programs may use: they cannot have cost a server that could use all of them more.
_OTHERS = 0.15

Judgement = Literal["valid", "implausible", "client-limited", "disturbed", "overloaded", "not-steady"]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What else used the processors of the client's machine."""

    processors: int | None = None
    load: float = 0.0  # the system's load average
    others: float | None = None  # processors that programs besides client and server used on average; None: unknown
    server: bool = False  # whether the server is on this machine too
    server_waited: float | None = None  # part of the time it had work that it waited for a processor; None: unknown

    @property
    def crowded(self) -> bool:
        """Whether other programs used more of the processors than they may."""
        return self.others is not None and self.others > _OTHERS * (self.processors or 1)

    @property
    def server_starved(self) -> bool:
        """Whether a server on this machine waited for processors that other programs used."""
        return self.server and self.crowded and (self.server_waited is None or self.server_waited > STARVED)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of a run, and why."""

    judgement: Judgement
    reasons: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether nothing speaks against the figures."""
        return self.judgement == "valid"

    def __str__(self) -> str:
        return f"{self.judgement}: {' '.join(self.reasons)}" if self.reasons else self.judgement


_UNKNOWN = Surroundings()


def judge(
    statistics: Statistics,
    records: Sequence[RequestRecord],
    health: Sequence[WorkerHealth],
    *,
    concurrency: int | None,
    capacity: float | None,
    surroundings: Surroundings = _UNKNOWN,
    implausible: Sequence[str] = (),
) -> Verdict:
    """Return the verdict. `capacity` is the highest rate of answers that the client reached on the echo server."""
    checks: tuple[tuple[Judgement, list[str]], ...] = (
        ("implausible", list(implausible)),
        ("client-limited", _client_limits(statistics, health, capacity=capacity)),
        ("disturbed", _disturbances(statistics, health, surroundings, concurrency=concurrency)),
        ("overloaded", _overload(statistics, records, concurrency=concurrency)),
        ("not-steady", _unsteadiness(statistics, records)),
    )
    return next(
        (Verdict(judgement=name, reasons=tuple(found)) for name, found in checks if found), Verdict(judgement="valid")
    )


def _client_limits(statistics: Statistics, health: Sequence[WorkerHealth], *, capacity: float | None) -> list[str]:
    found = []
    if capacity is not None and statistics.requests_per_second > MOST_OF_CAPACITY * capacity:
        found.append(
            f"{statistics.requests_per_second:.0f} answers/s are {statistics.requests_per_second / capacity:.0%} of "
            f"the {capacity:.0f}/s that this client reaches on the echo server; use more --workers or machines."
        )
    busy = (each for each in health if each.cpu > BUSY)
    return found + [f"Worker {each.worker} used {each.cpu:.0%} of a core; use more --workers." for each in busy]


def _disturbances(
    statistics: Statistics, health: Sequence[WorkerHealth], surroundings: Surroundings, *, concurrency: int | None
) -> list[str]:
    """Look for what kept client or server from their work, though they could have done more."""
    found = []
    latency = statistics.latency_from_send_ms.p50 or 0.0
    late_ms = max(LATE_MS, LATE_SHARE * min(latency, 1e6))
    starved = [
        each for each in health if each.run_queue_ms / 1e3 > STARVED * each.seconds or each.loop_lag_p99_ms > late_ms
    ]
    if starved or surroundings.server_starved:
        found.append(_starvation(max(starved, key=lambda each: each.run_queue_ms, default=None), surroundings))
    for each in health:
        who = f"Worker {each.worker}"
        if each.gc_pause_max_ms > SLOW_GC_MS:
            found.append(f"{who} was stopped for {each.gc_pause_max_ms:.0f} ms by its garbage collector.")
        if each.write_blocked_max_ms > late_ms:
            found.append(f"{who} could not send for {each.write_blocked_max_ms:.1f} ms: a socket took no more.")
        if each.crowded_reads:
            found.append(
                f"{who} found 32 KiB or more waiting in {each.crowded_reads} reads: it fell behind, or a proxy holds "
                "answers back."
            )
    delay = statistics.dispatch_delay_ms.p99
    # Behind a limit on concurrency the wait is the server's.
    if concurrency is None and delay is not None and delay > late_ms:
        found.append(f"Requests were sent late: p99 {delay:.1f} ms after their time.")
    return found


def _starvation(client: WorkerHealth | None, around: Surroundings) -> str:
    """Return who had the processors that the client's worker or the server waited for, how long, and what to do."""
    waits = []
    if client is not None:
        late = f", so its times are up to {client.loop_lag_p99_ms:.0f} ms late" if client.loop_lag_p99_ms >= 1 else ""
        waits.append(
            f"the client waited {client.run_queue_ms / 1e3:.1f} s of {client.seconds:.1f} s for a processor{late}"
        )
    if around.server_starved and around.server_waited is not None:
        waits.append(f"the server's threads waited {around.server_waited:.0%} of the time they had work")
    waited = "; ".join(waits) or "the server may have waited for them"
    cores = around.processors or 1
    here = f"{cores} core{'s' if cores > 1 else ''}"
    load = f"load {around.load:.1f} on {here}"
    away = "or measure from another machine"
    if around.crowded:
        away = away if client is not None else "or measure when they are idle"
        return (
            f"other programs used {around.others:.1f} of {here}, and {waited}. Close them (`top` names them), {away}."
        )
    if around.server:
        first = "give the client the processors first (as root: `chrt -f 10 trtserve bench …`)"
        return f"client and server share this machine ({load}); {waited}. Send less at once, {first}, {away}."
    return f"{load}; {waited}. Use more --workers, {away}."


def _overload(statistics: Statistics, records: Sequence[RequestRecord], *, concurrency: int | None) -> list[str]:
    """Look for a queue that grows as long as requests arrive."""
    ratio = statistics.delivered_ratio
    if ratio is None:
        return []
    if ratio < VALID_DELIVERY:
        behind = f" behind the limit of {concurrency} in flight" if concurrency else ""
        return [f"Requests queued{behind}: the delivered rate is only {ratio:.3f} of the offered one."]
    scheduled = [record for record in records if record.scheduled and record.sent_ns is not None]
    if len(scheduled) < FEWEST:
        return []
    span = max(record.intended_ns for record in scheduled) - min(record.intended_ns for record in scheduled)
    drain = statistics.steady.drain_seconds * 1e9
    third = len(scheduled) // 3
    first, last = (_mean_ns(part) for part in (scheduled[:third], scheduled[-third:]))
    if drain > _BACKLOG * span and first and last > 2 * first:
        grew = f"answers took {first / 1e6:.0f} ms at its start and {last / 1e6:.0f} ms at its end"
        return [f"The queue grew during the run: {grew}, and {drain / 1e9:.1f} s passed after the last request."]
    return []


def _mean_ns(records: Sequence[RequestRecord]) -> float:
    ended = [record.ended_ns - record.intended_ns for record in records if record.status == "completed"]
    return sum(ended) / len(ended) if ended else 0.0


def _unsteadiness(statistics: Statistics, records: Sequence[RequestRecord]) -> list[str]:
    completed = [record for record in records if record.status == "completed"]
    if len(completed) < FEWEST:
        return [f"{len(completed)} completed answers are too few to tell (at least {FEWEST})."]
    sent = [record for record in records if record.sent_ns is not None]
    last = max(record.intended_ns for record in sent)
    waiting = sum(record.ended_ns > last for record in sent)
    if 2 * waiting > len(sent):
        left = f"{waiting} of {len(sent)} requests were still unanswered when the last one was due"
        return [f"{left}: too few requests to reach a steady state at this load."]
    values = [(record.ended_ns - record.intended_ns) / 1e6 for record in completed]
    half = len(values) // 2
    before, after = mean_interval(values[:half]), mean_interval(values[half:])
    if before is None or after is None:
        return []
    first, second = sum(before) / 2, sum(after) / 2
    if before[0] <= after[1] and after[0] <= before[1]:
        return []  # MSER alone sees a change in one of ten short runs that have none
    if statistics.steady.warmup_requests >= len(completed):
        return ["No steady state: the times still changed in the second half of the run (MSER)."]
    if abs(second - first) > _DRIFT * first:
        return [f"The mean latency went from {first:.1f} ms in the first half to {second:.1f} ms in the second."]
    return []

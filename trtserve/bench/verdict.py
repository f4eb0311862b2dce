"""Whether the figures mean what they seem to mean: the verdict of a run, with its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trtserve.bench.health import Health
from trtserve.bench.intervals import FEWEST, mean_interval
from trtserve.bench.records import Record
from trtserve.bench.statistics import Statistics

VALID_DELIVERY = 0.99
MOST_OF_CAPACITY = 0.8
BUSY = 0.9
LATE_MS = 10.0
LATE_SHARE = 0.05
SLOW_GC_MS = 50.0
STARVED = 0.2
_DRIFT = 0.25
_BACKLOG = 0.1

Judgement = Literal["valid", "implausible", "client-limited", "overloaded", "not-steady"]


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


def judge(
    statistics: Statistics,
    records: Sequence[Record],
    health: Sequence[Health],
    *,
    concurrency: int | None,
    capacity: float | None,
    implausible: Sequence[str] = (),
) -> Verdict:
    """Return the verdict. `capacity` is the highest rate of answers that the client reached on the echo server."""
    checks: tuple[tuple[Judgement, list[str]], ...] = (
        ("implausible", list(implausible)),
        ("client-limited", _client_limits(statistics, health, concurrency=concurrency, capacity=capacity)),
        ("overloaded", _overload(statistics, records, concurrency=concurrency)),
        ("not-steady", _unsteadiness(statistics, records)),
    )
    return next((Verdict(judgement=name, reasons=tuple(found)) for name, found in checks if found), _VALID)


_VALID = Verdict(judgement="valid")


def _client_limits(
    statistics: Statistics, health: Sequence[Health], *, concurrency: int | None, capacity: float | None
) -> list[str]:
    found = []
    if capacity is not None and statistics.requests_per_second > MOST_OF_CAPACITY * capacity:
        found.append(
            f"{statistics.requests_per_second:.0f} answers/s are {statistics.requests_per_second / capacity:.0%} of "
            f"the {capacity:.0f}/s that this client reaches on the echo server; use more --workers or machines."
        )
    latency = statistics.latency_from_send_ms.p50 or 0.0
    late_ms = max(LATE_MS, LATE_SHARE * min(latency, 1e6))
    for each in health:
        who = f"Worker {each.worker}"
        if each.cpu > BUSY:
            found.append(f"{who} used {each.cpu:.0%} of a core; use more --workers.")
        if each.gc_pause_max_ms > SLOW_GC_MS:
            found.append(f"{who} was stopped for {each.gc_pause_max_ms:.0f} ms by its garbage collector.")
        if each.run_queue_ms / 1e3 > STARVED * each.seconds:
            found.append(f"{who} waited {each.run_queue_ms / 1e3:.1f} s of {each.seconds:.1f} s for a CPU.")
        if each.loop_lag_p99_ms > late_ms:
            found.append(f"{who}'s event loop was {each.loop_lag_p99_ms:.1f} ms late (p99), and so are its times.")
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


def _overload(statistics: Statistics, records: Sequence[Record], *, concurrency: int | None) -> list[str]:
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


def _mean_ns(records: Sequence[Record]) -> float:
    ended = [record.ended_ns - record.intended_ns for record in records if record.status == "completed"]
    return sum(ended) / len(ended) if ended else 0.0


def _unsteadiness(statistics: Statistics, records: Sequence[Record]) -> list[str]:
    completed = [record for record in records if record.status == "completed"]
    if len(completed) < FEWEST:
        return [f"{len(completed)} completed answers are too few to tell (at least {FEWEST})."]
    sent = [record for record in records if record.sent_ns is not None]
    last = max(record.intended_ns for record in sent)
    waiting = sum(record.ended_ns > last for record in sent)
    if 2 * waiting > len(sent):
        left = f"{waiting} of {len(sent)} requests were still unanswered when the last one was due"
        return [f"{left}: too few requests to reach a steady state at this load."]
    if statistics.steady.warmup_requests >= len(completed):
        return ["No steady state: the times still changed in the second half of the run (MSER)."]
    values = [(record.ended_ns - record.intended_ns) / 1e6 for record in completed]
    half = len(values) // 2
    before, after = mean_interval(values[:half]), mean_interval(values[half:])
    if before is None or after is None:
        return []
    first, second = sum(before) / 2, sum(after) / 2
    apart = before[1] < after[0] or after[1] < before[0]
    if apart and abs(second - first) > _DRIFT * first:
        return [f"The mean latency went from {first:.1f} ms in the first half to {second:.1f} ms in the second."]
    return []

"""Figures that cannot be: faster than the hardware, more tokens than were generated, times that do not fit together."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtserve.bench.goals import first_token_ms
from trtserve.bench.records import Record

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

    weight_bytes: int | None = None
    """Bytes that every step reads."""
    bytes_per_second: float | None = None
    operations_per_second: float | None = None


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
    return Machine(weight_bytes=size, bytes_per_second=_memory_bandwidth())


def _memory_bandwidth() -> float:
    """Return bytes per second of all cores together: one core's rate times their number is an upper bound."""
    import numpy as np

    array = np.ones(32 * 1024**2 // 8)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        array.sum()
        best = min(best, time.perf_counter() - began)
    return array.nbytes / best * (os.cpu_count() or 1)


def implausible(
    records: Sequence[Record],
    *,
    machine: Machine | None = None,
    rows: Sequence[Mapping[str, float]] = (),
    server_tokens: float | None = None,
) -> list[str]:
    """Return what cannot be true about the records.

    `rows` and `server_tokens` were counted beside the run.
    """
    machine = machine or Machine()
    completed = [record for record in records if record.status == "completed"]
    return [
        *_too_fast(completed, machine),
        *_wrong_counts(completed, server_tokens),
        *_little(records, rows),
        *_disorder(completed),
    ]


def _too_fast(completed: Sequence[Record], machine: Machine) -> list[str]:
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


def _wrong_counts(completed: Sequence[Record], server_tokens: float | None) -> list[str]:
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


def _little(records: Sequence[Record], rows: Sequence[Mapping[str, float]]) -> list[str]:
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


def _disorder(completed: Sequence[Record]) -> list[str]:
    """Look for times that run backwards."""
    wrong = sum(
        record.sent_ns is None
        or not all(
            record.sent_ns <= time <= record.ended_ns for time, _ in (record.arrivals[:1] + record.arrivals[-1:])
        )
        for record in completed
    )
    return [f"{wrong} answers begin before they were asked for, or end before their last token."] if wrong else []

"""Recorded traces: requests at the times and with the lengths that a real service saw.

Mooncake's JSON lines have `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for every 512 tokens:
equal ids mean equal tokens. Azure's CSV files have TIMESTAMP, ContextTokens and GeneratedTokens.
"""

from __future__ import annotations

import csv
import datetime
from dataclasses import dataclass, replace
from pathlib import Path

from trtserve.bench.requests import (
    Limits,
    Traffic,
    TrafficRequest,
    clip,
)
from trtserve.bench.traffic.prompts import IdWriter, Prompt, Writer
from trtserve.errors import UsageError
from trtserve.files import parse_json
from trtserve.specs import BenchSpec

BLOCK = 512
_FORM = (
    "Expected Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids) or Azure's CSV (TIMESTAMP, "
    "ContextTokens, GeneratedTokens)."
)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a trace."""

    seconds: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of BLOCK tokens; empty: its tokens are shared with no other prompt."""


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace in order of time; the first request is at 0. Raises UsageError for another form."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        found = _mooncake(lines) if lines and lines[0].lstrip().startswith("{") else _azure(lines)
    except OSError as error:
        raise UsageError(f"--trace is {path}: {error.strerror}.", hint=_FORM) from None
    except KeyError as error:
        raise UsageError(f"--trace is {path}, which is not a trace: a request has no {error}.", hint=_FORM) from None
    except (ValueError, TypeError, AttributeError, OverflowError, csv.Error) as error:
        raise UsageError(f"--trace is {path}, which is not a trace: {error}.", hint=_FORM) from None
    if not found:
        raise UsageError(f"--trace is {path}, which has no requests.", hint=_FORM)
    found.sort(key=lambda arrival: arrival.seconds)
    start = found[0].seconds
    return [replace(arrival, seconds=arrival.seconds - start) for arrival in found]


def _mooncake(lines: list[str]) -> list[Arrival]:
    found = []
    for line in filter(None, map(str.strip, lines)):
        entry = parse_json(line)
        found.append(
            Arrival(
                seconds=float(entry["timestamp"]) / 1000,
                input_len=int(entry["input_length"]),
                output_len=int(entry["output_length"]),
                blocks=tuple(entry.get("hash_ids", ())),
            )
        )
    return found


def _azure(lines: list[str]) -> list[Arrival]:
    return [
        Arrival(
            seconds=_seconds(row["TIMESTAMP"]),
            input_len=int(row["ContextTokens"]),
            output_len=int(row["GeneratedTokens"]),
        )
        for row in csv.DictReader(lines)
    ]


def _seconds(text: str) -> float:
    """Read Azure's time stamps, which have seven digits after the seconds and sometimes a zone."""
    whole, _, fraction = text.strip().partition(".")
    digits = fraction[: next((place for place, letter in enumerate(fraction) if not letter.isdigit()), len(fraction))]
    moment = datetime.datetime.fromisoformat(whole[:19]).replace(tzinfo=datetime.timezone.utc)
    return moment.timestamp() + float(f"0.{digits or 0}")


def replay(spec: BenchSpec, limits: Limits, *, write: Writer | None = None, end_id: int | None = None) -> Traffic:
    """Return the first `num_requests` requests of a trace, `speed` times as fast as recorded."""
    import numpy as np

    if spec.trace is None:
        raise UsageError("--trace is missing.")
    arrivals = read_trace(spec.trace)[: spec.num_requests]
    writer = write or IdWriter(limits, np.random.default_rng([spec.seed, 4]))
    blocks: dict[int, Prompt] = {}
    requests, clipped_inputs, clipped_outputs = [], 0, 0
    for arrival in arrivals:
        input_len, output_len = clip(max(1, arrival.input_len), max(1, arrival.output_len), limits)
        clipped_inputs += input_len < arrival.input_len
        clipped_outputs += output_len < arrival.output_len
        ids, text = _prompt(arrival, input_len, writer, blocks)
        requests.append(TrafficRequest(token_ids=ids, output_len=output_len, text=text, end_id=end_id))
    return Traffic(
        requests=tuple(requests),
        clipped_inputs=clipped_inputs,
        clipped_outputs=clipped_outputs,
        offsets=tuple(arrival.seconds / spec.speed for arrival in arrivals),
        notes=(f"Replayed {len(arrivals)} requests of {spec.trace}, at {spec.speed:g} × the recorded speed.",),
    )


def _prompt(arrival: Arrival, length: int, write: Writer, blocks: dict[int, Prompt]) -> Prompt:
    """Return a prompt of `length` tokens that consists of the trace's blocks, and random tokens after them."""
    parts, left = [], length
    for block in arrival.blocks:
        if left < BLOCK:
            break
        if block not in blocks:
            blocks[block] = write(BLOCK)
        parts.append(blocks[block])
        left -= BLOCK
    if left:
        parts.append(write(left))
    return parts[0] if len(parts) == 1 else write.join(parts)

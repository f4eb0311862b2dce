"""Requests of drawn lengths: normally distributed, or from a histogram."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trtserve.bench.requests import (
    Limits,
    Traffic,
    TrafficRequest,
    clip,
)
from trtserve.bench.traffic.prompts import IdWriter, Writer
from trtserve.errors import UsageError
from trtserve.files import parse_json
from trtserve.specs import BenchSpec

Buckets = list[tuple[int, int, int]]
"""Shortest and longest length of a bucket, and how often it occurs."""

# The built-in histogram of benchmark_core_model.py.
EXAMPLE: dict[str, Buckets] = {
    "input": [(151, 175, 220), (176, 200, 225), (201, 225, 150), (226, 250, 150), (251, 275, 140)],
    "output": [(6, 10, 76), (11, 15, 210), (16, 20, 174), (21, 25, 130), (26, 30, 152)],
}
_COLUMNS = ("kind", "from", "to", "count")
_FORM = (
    f"Expected a CSV file with the columns {', '.join(_COLUMNS)} (kind: input or output), or JSON such as "
    '{"input": [[151, 175, 220]], "output": [[6, 10, 76]]}.'
)


def token_norm_dist(
    spec: BenchSpec, limits: Limits, *, write: Writer | None = None, end_id: int | None = None
) -> Traffic:
    """Return requests with normally distributed lengths, max(1, ceil(x)) as in upstream's benchmark.

    Unlike upstream, random ids are inside the vocabulary, lengths above a limit are cut instead of dropped, and the
    same seed gives the same requests. `write` replaces the random ids; the lengths stay the same.
    """
    import numpy as np

    generator = np.random.default_rng([spec.seed, 0])
    inputs = _lengths(generator.normal(spec.input_mean, spec.input_stdev, spec.num_requests))
    outputs = _lengths(generator.normal(spec.output_mean, spec.output_stdev, spec.num_requests))
    return of_lengths(inputs, outputs, limits, write or IdWriter(limits, generator), end_id=end_id)


def token_from_histogram(
    spec: BenchSpec, limits: Limits, *, write: Writer | None = None, end_id: int | None = None
) -> Traffic:
    """Return requests whose lengths have the frequencies of a histogram, uniform within a bucket."""
    import numpy as np

    generator = np.random.default_rng([spec.seed, 0])
    buckets = EXAMPLE if spec.histogram == "example" else read_histogram(Path(spec.histogram))
    inputs, outputs = (_drawn(buckets[kind], spec.num_requests, generator) for kind in ("input", "output"))
    return of_lengths(inputs, outputs, limits, write or IdWriter(limits, generator), end_id=end_id)


def of_lengths(
    inputs: Sequence[int], outputs: Sequence[int], limits: Limits, write: Writer, *, end_id: int | None
) -> Traffic:
    """Return one request for each pair of lengths, cut to the limits."""
    pairs = [clip(*wanted, limits) for wanted in zip(inputs, outputs, strict=True)]
    requests = []
    for input_len, output_len in pairs:
        ids, text = write(input_len)
        requests.append(TrafficRequest(token_ids=ids, output_len=output_len, text=text, end_id=end_id))
    missed = sum(len(request.token_ids) != length for request, (length, _) in zip(requests, pairs, strict=True))
    note = f"{missed} prompts do not have the drawn length: the tokenizer has no text of exactly that many tokens."
    return Traffic(
        requests=tuple(requests),
        clipped_inputs=sum(length < wanted for (length, _), wanted in zip(pairs, inputs, strict=True)),
        clipped_outputs=sum(length < wanted for (_, length), wanted in zip(pairs, outputs, strict=True)),
        notes=(note,) if missed else (),
    )


def read_histogram(path: Path) -> dict[str, Buckets]:
    """Read the buckets of prompt and answer lengths. Raises UsageError for another form."""
    try:
        content = path.read_text(encoding="utf-8")
        found = _of_json(parse_json(content)) if content.lstrip().startswith("{") else _of_csv(content)
    except OSError as error:
        raise UsageError(f"--histogram is {path}: {error.strerror}.", hint=_FORM) from None
    except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
        raise UsageError(f"--histogram is {path}, which is not a histogram: {error}.", hint=_FORM) from None
    for kind, buckets in found.items():
        if not buckets or any(low < 1 or high < low or count < 0 for low, high, count in buckets):
            raise UsageError(f"--histogram is {path}, whose {kind} buckets are empty or invalid.", hint=_FORM)
    return found


def _of_json(content: dict[str, Any]) -> dict[str, Buckets]:
    return {kind: [(int(low), int(high), int(count)) for low, high, count in content[kind]] for kind in EXAMPLE}


def _of_csv(content: str) -> dict[str, Buckets]:
    found: dict[str, Buckets] = {kind: [] for kind in EXAMPLE}
    for row in csv.DictReader(content.splitlines()):
        found[row["kind"]].append((int(row["from"]), int(row["to"]), int(row["count"])))
    return found


def _drawn(buckets: Buckets, count: int, generator: Any) -> list[int]:
    weights = [frequency / sum(frequency for *_, frequency in buckets) for *_, frequency in buckets]
    chosen = generator.choice(len(buckets), size=count, p=weights)
    return [int(generator.integers(buckets[index][0], buckets[index][1] + 1)) for index in chosen]


def _lengths(values: Iterable[float]) -> list[int]:
    return [max(1, math.ceil(value)) for value in values]

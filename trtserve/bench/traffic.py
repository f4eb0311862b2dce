"""Kinds of traffic: which requests a run sends, and when."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtserve.bench.prompts import IdWriter, Writer, replay
from trtserve.bench.records import Traffic, TrafficLimits, TrafficRequest, clip
from trtserve.errors import UsageError
from trtserve.files import parse_json, read_text
from trtserve.specs import BenchSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Arrivals = Literal["exponential", "constant", "gamma"]


def arrival_times(
    kind: Arrivals, *, rate: float, count: int, seed: int, burstiness: float = 1.0, ramp_to: float | None = None
) -> list[float]:
    """Return the offsets in seconds of `count` arrivals at `rate` per second on average; the first is 0.

    Offsets are absolute, so a request that is sent late never delays those after it. `burstiness` is the shape of
    gamma gaps: 1 equals exponential, less is burstier, more is smoother. With `ramp_to` the rate changes linearly from
    `rate` to that rate.
    """
    import numpy as np

    if kind == "constant":
        unit: npt.NDArray[np.float64] = np.arange(count, dtype=np.float64)
    else:
        shape = burstiness if kind == "gamma" else 1.0
        gaps = np.random.default_rng([seed, 1]).gamma(shape, 1 / shape, count - 1)
        unit = np.concatenate([[0.0], np.cumsum(gaps)])
    offsets: list[float] = _stretched(unit, rate, rate if ramp_to is None else ramp_to, count).tolist()
    return offsets


def _stretched(unit: npt.NDArray[np.float64], first: float, last: float, count: int) -> npt.NDArray[np.float64]:
    """Turn arrivals at rate 1 into arrivals whose rate goes linearly from `first` to `last` over `count` requests.

    The expected number of arrivals until t is first·t + slope·t²/2; this solves it for t.
    """
    import numpy as np

    if first == last:
        return unit / first
    slope = (last**2 - first**2) / (2 * count)  # the ramp takes 2·count / (first + last) seconds
    # After the ramp the rate stays at `last`.
    ramp = np.minimum(unit, count)
    ramped = (np.sqrt(np.maximum(0.0, first**2 + 2 * slope * ramp)) - first) / slope
    return np.asarray(ramped + (unit - ramp) / last)


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
    spec: BenchSpec, limits: TrafficLimits, *, write: Writer | None = None, end_id: int | None = None
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
    spec: BenchSpec, limits: TrafficLimits, *, write: Writer | None = None, end_id: int | None = None
) -> Traffic:
    """Return requests whose lengths have the frequencies of a histogram, uniform within a bucket."""
    import numpy as np

    generator = np.random.default_rng([spec.seed, 0])
    buckets = EXAMPLE if spec.histogram == "example" else read_histogram(Path(spec.histogram))
    inputs, outputs = (_drawn(buckets[kind], spec.num_requests, generator) for kind in ("input", "output"))
    return of_lengths(inputs, outputs, limits, write or IdWriter(limits, generator), end_id=end_id)


def of_lengths(
    inputs: Sequence[int], outputs: Sequence[int], limits: TrafficLimits, write: Writer, *, end_id: int | None
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
        content = read_text(path, UsageError, pipes=True)
        if content.lstrip().startswith("{"):
            listed = parse_json(content)
            found = {kind: [(int(low), int(high), int(count)) for low, high, count in listed[kind]] for kind in EXAMPLE}
        else:
            found = _of_csv(content)
    except FileNotFoundError as error:
        raise UsageError(f"--histogram is {path}: {error.strerror}.", hint=_FORM) from None
    except (ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
        raise UsageError(f"--histogram is {path}, which is not a histogram: {error}.", hint=_FORM) from None
    for kind, buckets in found.items():
        if not buckets or any(low < 1 or high < low or count < 0 for low, high, count in buckets):
            raise UsageError(f"--histogram is {path}, whose {kind} buckets are empty or invalid.", hint=_FORM)
    return found


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


def shared_prefixes(
    spec: BenchSpec, limits: TrafficLimits, *, write: Writer | None = None, end_id: int | None = None
) -> Traffic:
    """Return requests that begin with one of `num_prefixes` prefixes, or at `1 - reuse_rate` with one of their own.

    The lengths of `token_norm_dist` are those of the part after the prefix.
    """
    import numpy as np

    room = (
        limits.max_input_len
        if limits.max_seq_len is None
        else min(limits.max_seq_len - 1, limits.max_input_len or limits.max_seq_len)
    )
    if room is not None and spec.prefix_len >= room:
        raise UsageError(
            f"--prefix-len is {spec.prefix_len}, but the engine takes prompts of at most {room} tokens.",
            hint="Shorten the prefix, or build the engine for longer prompts (--max-input-len, --max-seq-len).",
        )
    generator = np.random.default_rng([spec.seed, 2])
    writer = write or IdWriter(limits, generator)
    shared = [writer(spec.prefix_len) for _ in range(spec.num_prefixes)]
    own = generator.random(spec.num_requests) >= spec.reuse_rate
    after = _beyond(limits, spec.prefix_len)
    traffic = token_norm_dist(spec, after, write=writer, end_id=end_id)
    requests = []
    for index, request in enumerate(traffic.requests):
        prefix = writer(spec.prefix_len) if own[index] else shared[int(generator.integers(len(shared)))]
        ids, text = writer.join([prefix, (request.token_ids, request.text)])
        requests.append(replace(request, token_ids=ids, text=text))
    note = f"{int((~own).sum())} of {len(requests)} prompts begin with one of {len(shared)} shared prefixes."
    return replace(traffic, requests=tuple(requests), notes=(*traffic.notes, note))


def sessions(
    spec: BenchSpec, limits: TrafficLimits, *, write: Writer | None = None, end_id: int | None = None
) -> Traffic:
    """Return conversations of `turns` requests, whose prompts are all prompts and answers before and a new question.

    `num_requests` counts the requests of all turns. Conversations end early where the next turn would not fit.
    """
    import numpy as np

    generator = np.random.default_rng([spec.seed, 3])
    writer = write or IdWriter(limits, generator)
    drawn = token_norm_dist(spec, limits, write=writer, end_id=end_id)
    requests: list[TrafficRequest] = []
    session, turns, used = 0, 0, 0
    for request in drawn.requests:
        length = len(request.token_ids)
        fits = clip(used + length, request.output_len, limits) == (used + length, request.output_len)
        if turns == spec.turns or (turns and not fits):
            session, turns, used = session + 1, 0, 0
        requests.append(replace(request, session=session))
        turns, used = turns + 1, used + length + request.output_len
    note = f"{len(requests)} requests are the turns of {session + 1} conversations."
    return replace(drawn, requests=tuple(requests), notes=(*drawn.notes, note))


def _beyond(limits: TrafficLimits, used: int) -> TrafficLimits:
    """Return the limits that remain after `used` tokens of the prompt."""
    return replace(
        limits,
        max_input_len=None if limits.max_input_len is None else limits.max_input_len - used,
        max_seq_len=None if limits.max_seq_len is None else limits.max_seq_len - used,
    )


# Kinds whose prompts are written here; a dataset brings its own.
WRITTEN: dict[str, Callable[..., Traffic]] = {
    "token-norm-dist": token_norm_dist,
    "token-from-histogram": token_from_histogram,
    "prefix": shared_prefixes,
    "sessions": sessions,
    "replay": replay,
}


def with_cancellations(traffic: Traffic, spec: BenchSpec) -> Traffic:
    """Return the traffic with a part of its requests, `cancel_rate`, to be cancelled at a random token."""
    import numpy as np

    if not spec.cancel_rate:
        return traffic
    generator = np.random.default_rng([spec.seed, 5])
    chosen = generator.random(len(traffic.requests)) < spec.cancel_rate
    requests = tuple(
        replace(request, cancel_after=int(generator.integers(1, max(2, request.output_len)))) if cancelled else request
        for request, cancelled in zip(traffic.requests, chosen, strict=True)
    )
    note = f"{int(chosen.sum())} requests are cancelled by the client at a random response (--cancel-rate)."
    return replace(traffic, requests=requests, notes=(*traffic.notes, note))

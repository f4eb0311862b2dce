"""Kinds of traffic: which requests a run sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trtserve.bench.requests import Traffic
from trtserve.bench.traffic.conversations import sessions, shared_prefixes
from trtserve.bench.traffic.lengths import token_from_histogram, token_norm_dist
from trtserve.bench.traffic.traces import replay
from trtserve.specs import BenchSpec

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

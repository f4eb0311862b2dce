"""Requests that share a beginning: system prompts that several users have, and conversations of several turns."""

from __future__ import annotations

from dataclasses import replace

from trtserve.bench.requests import (
    Limits,
    Traffic,
    TrafficRequest,
    clip,
)
from trtserve.bench.traffic.lengths import token_norm_dist
from trtserve.bench.traffic.prompts import IdWriter, Writer
from trtserve.errors import UsageError
from trtserve.specs import BenchSpec


def shared_prefixes(
    spec: BenchSpec, limits: Limits, *, write: Writer | None = None, end_id: int | None = None
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


def sessions(spec: BenchSpec, limits: Limits, *, write: Writer | None = None, end_id: int | None = None) -> Traffic:
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


def _beyond(limits: Limits, used: int) -> Limits:
    """Return the limits that remain after `used` tokens of the prompt."""
    return replace(
        limits,
        max_input_len=None if limits.max_input_len is None else limits.max_input_len - used,
        max_seq_len=None if limits.max_seq_len is None else limits.max_seq_len - used,
    )

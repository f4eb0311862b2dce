"""Schedulers with a real KV cache, and steps that use it as the executor does, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np

from trtserve.executor.engine.kv_cache import CacheKey, KvCache
from trtserve.executor.engine.limits import EngineLimits
from trtserve.executor.engine.sampling import SamplingParameters
from trtserve.executor.engine.scheduler import Scheduler, StepPlan
from trtserve.executor.engine.sequence import Sequence


def make_scheduler(
    *,
    blocks: int = 100,
    batch: int = 8,
    tokens: int = 64,
    chunked: bool = False,
    beams: int = 1,
    reuse: bool = False,
    windows: tuple[int, ...] = (),
    max_draft_len: int = 0,
    long_rope_beyond: int | None = None,
    **options: Any,
) -> Scheduler:
    """A scheduler over a cache of blocks of 4 tokens, for requests of at most 200 tokens."""
    limits = EngineLimits(
        max_batch_size=batch,
        max_seq_len=200,
        max_num_tokens=tokens,
        vocab_size=97,
        chunked=chunked,
        max_beam_width=beams,
        windows=windows,
        max_draft_len=max_draft_len,
        long_rope_beyond=long_rope_beyond,
    )
    cache = KvCache(
        blocks=blocks,
        tokens_per_block=4,
        max_rows=limits.max_rows,
        max_tokens=200,
        copy_block=lambda source, target: None,
        reuse=reuse,
    )
    return Scheduler(limits, cache, **options)


def make_sequence(number: int, prompt: int | list[int], new: int = 4, width: int = 1, **options: Any) -> Sequence:
    """A request of `new` tokens; a prompt given by its length has the ids 0, 1, 2 …"""
    tokens = np.array(range(prompt) if isinstance(prompt, int) else prompt, dtype=np.int64)
    key = CacheKey(tokens, stored=width == 1)
    parameters = SamplingParameters(beam_width=width)
    return Sequence(id=number, prompt=tokens, max_tokens=new, parameters=parameters, key=key, **options)


def add(scheduler: Scheduler, number: int, prompt: int | list[int], new: int = 4, **options: Any) -> Sequence:
    """Make a new sequence active."""
    sequence = make_sequence(number, prompt, new, **options)
    scheduler.add(sequence)
    return sequence


def run_step(scheduler: Scheduler) -> StepPlan:
    """Plan one step and update the cache as a step does; a sequence generates its own id."""
    plan = scheduler.plan_step()
    for sequence, size in plan.chunks:
        sequence.computed += size
        scheduler.cache.extend(sequence.slots[0], sequence.computed)
        if sequence.generating and sequence.width > 1:
            scheduler.cache.fork(sequence.slots, sequence.computed)
    for sequence in plan.generations:
        sequence.computed += 1
        for slot in sequence.slots:
            scheduler.cache.extend(slot, sequence.computed)
    for sequence in [*(sequence for sequence, _ in plan.chunks), *plan.generations]:
        if sequence.width == 1:
            scheduler.cache.register_full_blocks(sequence.slots[0], sequence.cached_tokens()[: sequence.computed])
        if sequence.generating:
            sequence.generated.append(sequence.id)
    return plan


def shape(plan: StepPlan) -> tuple[list[tuple[int, int]], list[int]]:
    """Ids and sizes of the chunks, ids of the generations."""
    return [(sequence.id, size) for sequence, size in plan.chunks], [sequence.id for sequence in plan.generations]


def paused(plan: StepPlan) -> list[int]:
    """Ids of the paused sequences."""
    return [sequence.id for sequence in plan.paused]

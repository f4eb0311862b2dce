"""Smaller steps: the effect of `max_batch_size` and `max_num_tokens` on an engine's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trtserve.executor.runtimes import EnginePlan
from trtserve.host.machine import format_bytes, free_memory
from trtserve.pipeline.planner.stage_needs import engine_needs_of, server_processes

# Larger steps gain nothing on a CPU (these are the runtime's defaults); fewer tokens than the last value only slow down
# prompts.
_BATCH = 16
USUAL_TOKENS = 2048
_FEWEST_TOKENS = 256
# The smallest KV cache in tokens.
_BLOCK = 32


def usual_steps(batch: int, tokens: int, *, beams: int = 1) -> Iterator[tuple[int, int]]:
    """Return smaller (max_batch_size, max_num_tokens) in powers of two that cost no speed, closest first.

    Tokens shrink first; the batch shrinks only when it requires that many tokens.
    """
    for fewer in _powers_below(tokens, max(USUAL_TOKENS, batch * beams)):
        yield batch, fewer
    for rows in _powers_below(batch, _BATCH):
        yield rows, min(tokens, max(USUAL_TOKENS, rows * beams))


def smallest_step(batch: int, tokens: int, *, beams: int = 1) -> tuple[int, int]:
    """Return the step with the least memory that refuses no further requests."""
    rows = min(batch, _BATCH)
    return rows, min(tokens, max(_FEWEST_TOKENS, rows * beams))


def step_flags(asked: tuple[int, int], step: tuple[int, int]) -> str:
    """Return the options of `build` and `import` that set `step`, or "" when it is unchanged."""
    named = zip(("--max-batch-size", "--max-num-tokens"), asked, step, strict=True)
    return " ".join(f"{flag} {value}" for flag, before, value in named if value != before)


def fitting_step(engine: Mapping[str, Any], room: int) -> str | None:
    """Return options with which an engine in main memory needs at most `room` bytes without its cache."""
    build = engine["build_config"]
    asked, beams = (int(build["max_batch_size"]), int(build["max_num_tokens"])), int(build.get("max_beam_width", 1))
    for batch, tokens in (*usual_steps(*asked, beams=beams), smallest_step(*asked, beams=beams)):
        changed = {**build, "max_batch_size": batch, "max_num_tokens": tokens}
        if engine_needs_of({**engine, "build_config": changed}).serving <= room:
            return step_flags(asked, (batch, tokens)) or None
    return None


def serving_note(engine: EnginePlan) -> str | None:
    """Return a note when an engine can be built but not served from the currently free memory.

    Returns None for runtimes that serve from GPUs.
    """
    if engine.needs_gpu:
        return None
    around, free = server_processes() + _BLOCK * engine.kv_bytes_per_token, free_memory()
    needed = engine.serving_bytes + around
    if needed <= free:
        return None
    smaller = fitting_step(engine.config_outline(), free - around)
    return (
        f"Serving this engine will take {format_bytes(needed)} of memory (max_batch_size "
        f"{engine.limits.max_batch_size}, "
        f"max_num_tokens {engine.limits.max_num_tokens}), but only {format_bytes(free)} are free"
        f"{f'; {smaller} would fit' if smaller else ''}."
    )


def _powers_below(value: int, least: int) -> Iterator[int]:
    """Return powers of two below `value`, largest first, then `least`; nothing when `value` is not larger."""
    power = 1 << (value - 1).bit_length() >> 1 if value > 1 else 0
    while power > least:
        yield power
        power //= 2
    if value > least:
        yield least

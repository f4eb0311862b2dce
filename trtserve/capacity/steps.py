"""Steps of fewer requests and tokens: what an engine's `max_batch_size` and `max_num_tokens` make it take of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trtserve.capacity.needs import engine_needs_of, server_processes
from trtserve.machine import free_memory, gibibytes
from trtserve.runtimes import EnginePlan

# A step of more requests or tokens than these gains nothing on a CPU (the runtime's own defaults); one of fewer tokens
# than the last only makes prompts slower.
_BATCH = 16
USUAL_TOKENS = 2048
_FEWEST_TOKENS = 256
# The smallest KV cache, in tokens.
_BLOCK = 32


def usual_steps(batch: int, tokens: int, *, beams: int = 1) -> Iterator[tuple[int, int]]:
    """Smaller (max_batch_size, max_num_tokens), in powers of two, down to what costs nothing; the nearest first.

    Tokens come first: a batch is smaller only where it is what asks for so many.
    """
    for fewer in _powers_below(tokens, max(USUAL_TOKENS, batch * beams)):
        yield batch, fewer
    for rows in _powers_below(batch, _BATCH):
        yield rows, min(tokens, max(USUAL_TOKENS, rows * beams))


def smallest_step(batch: int, tokens: int, *, beams: int = 1) -> tuple[int, int]:
    """The step that takes least without refusing a request that others would not."""
    rows = min(batch, _BATCH)
    return rows, min(tokens, max(_FEWEST_TOKENS, rows * beams))


def step_flags(asked: tuple[int, int], step: tuple[int, int]) -> str:
    """The options of `build` and `import` that make `step` of what was asked for; "" when they are the same."""
    named = zip(("--max-batch-size", "--max-num-tokens"), asked, step, strict=True)
    return " ".join(f"{flag} {value}" for flag, before, value in named if value != before)


def fitting_step(engine: Mapping[str, Any], room: int) -> str | None:
    """Options with which an engine of the openvino runtime takes no more than `room` bytes without its cache."""
    build = engine["build_config"]
    asked, beams = (int(build["max_batch_size"]), int(build["max_num_tokens"])), int(build.get("max_beam_width", 1))
    for batch, tokens in (*usual_steps(*asked, beams=beams), smallest_step(*asked, beams=beams)):
        changed = {**build, "max_batch_size": batch, "max_num_tokens": tokens}
        if engine_needs_of({**engine, "build_config": changed}).serving <= room:
            return step_flags(asked, (batch, tokens)) or None
    return None


def serving_note(engine: EnginePlan) -> str | None:
    """What to say of an engine that can be built, and then not be served from the memory that is free now.

    None also for other runtimes, which serve from GPUs.
    """
    if "trtserve" not in engine.config_outline():
        return None
    around, free = server_processes() + _BLOCK * engine.kv_bytes_per_token, free_memory()
    needed = engine.serving_bytes + around
    if needed <= free:
        return None
    smaller = fitting_step(engine.config_outline(), free - around)
    return (
        f"Serving this engine will take {gibibytes(needed)} of memory (max_batch_size {engine.limits.max_batch_size}, "
        f"max_num_tokens {engine.limits.max_num_tokens}), and {gibibytes(free)} are free here"
        f"{f'; {smaller} would fit' if smaller else ''}."
    )


def _powers_below(value: int, least: int) -> Iterator[int]:
    """Powers of two below `value`, the largest first, and last `least` itself; none where `value` is no larger."""
    power = 1 << (value - 1).bit_length() >> 1 if value > 1 else 0
    while power > least:
        yield power
        power //= 2
    if value > least:
        yield least

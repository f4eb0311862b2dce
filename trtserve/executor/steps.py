"""Memory of an engine on this machine, and smaller steps (`max_batch_size`, `max_num_tokens`) that fit it."""

from __future__ import annotations

from collections.abc import Iterator

from trtserve.artifacts.engine_config import EngineConfig
from trtserve.executor.loaders import embedded_runtime
from trtserve.executor.runtimes import RUNTIMES
from trtserve.specs.runtime import EngineNeeds

# Larger steps gain nothing on a CPU (these are the runtime's defaults); fewer tokens than the last value only slow down
# prompts.
_BATCH = 16
USUAL_TOKENS = 2048
_FEWEST_TOKENS = 256


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


def engine_needs_of(config: EngineConfig) -> EngineNeeds:
    """Return the memory that an existing engine needs, from its `config.json`; 0 for one on GPUs."""
    return RUNTIMES[str(embedded_runtime(config))].memory_of(config)


def draft_memory(config: EngineConfig, kv_tokens: int | None) -> int:
    """Return the memory of a draft model's process, with `kv_tokens` of cache, or one sequence's."""
    needs = engine_needs_of(config)
    return needs.serving + (kv_tokens or config.build.max_seq_len) * needs.kv_per_token


def fitting_step(engine: EngineConfig, room: int) -> str | None:
    """Return options with which an engine in main memory needs at most `room` bytes without its cache."""
    asked, beams = (engine.build.max_batch_size, engine.build.max_num_tokens), engine.build.max_beam_width
    for batch, tokens in (*usual_steps(*asked, beams=beams), smallest_step(*asked, beams=beams)):
        if engine_needs_of(engine.with_build(max_batch_size=batch, max_num_tokens=tokens)).serving <= room:
            return step_flags(asked, (batch, tokens)) or None
    return None


def _powers_below(value: int, least: int) -> Iterator[int]:
    """Return powers of two below `value`, largest first, then `least`; nothing when `value` is not larger."""
    power = 1 << (value - 1).bit_length() >> 1 if value > 1 else 0
    while power > least:
        yield power
        power //= 2
    if value > least:
        yield least

"""Durations as TensorRT-LLM reports them."""

from __future__ import annotations

from datetime import timedelta


def nanoseconds(duration: timedelta) -> int:
    """Return exact nanoseconds; `total_seconds()` would round."""
    return ((duration.days * 86_400 + duration.seconds) * 1_000_000 + duration.microseconds) * 1_000

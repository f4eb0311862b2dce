"""How far two texts, or two lists of ids, are the same."""

from __future__ import annotations

from collections.abc import Sequence


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Number of items at the beginning that both have."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))

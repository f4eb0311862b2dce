"""What a numerical check is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtserve.specs.fields import require_positive


@dataclass(frozen=True, kw_only=True)
class CheckSpec:
    """What a numerical check asks both models: `max_tokens` of each greedy answer; None: the built-in prompts."""

    max_tokens: int = 16
    prompts: Path | None = None

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens")

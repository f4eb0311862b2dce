"""What one BLS model knows before the first request: the models behind it, and what they can take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lora_names import LoraNames


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Names of the models behind a BLS model, and how it works with them.

    `inputs` and `outputs` are the BLS model's own, without `text_output`; `accumulate` sends the whole text each time;
    `exclude_input` is what the core model does when a request does not say it. `longest` and `draft_longest` are the
    most tokens of prompt and answer (max_seq_len) of both engines, None where nobody says them. `pushed` means that
    the core model sends its answers when it has them (NVIDIA's C++ backend), instead of when they are fetched.
    """

    core: str
    lora: LoraNames
    inputs: frozenset[str] = frozenset()
    outputs: tuple[str, ...] = ()
    accumulate: bool = False
    exclude_input: bool = False
    longest: int | None = None
    draft: str | None = None
    draft_longest: int | None = None
    preprocessing: str = "preprocessing"
    postprocessing: str = "postprocessing"
    pushed: bool = False

    @property
    def seed_input(self) -> str:
        """What the release calls the seed."""
        return "seed" if "seed" in self.inputs else "random_seed"

    @property
    def min_tokens_input(self) -> str:
        """What the release calls the least number of new tokens."""
        return "min_tokens" if "min_tokens" in self.inputs else "min_length"


def engine_length(repository: Path, model: str) -> int | None:
    """max_seq_len of the engine in the folder of `model`; None when it lies elsewhere."""
    try:
        config = json.loads((repository / model / "1" / "config.json").read_text(encoding="utf-8"))
        return int(config["build_config"]["max_seq_len"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

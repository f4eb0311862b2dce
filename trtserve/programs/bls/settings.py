"""The settings of one BLS model: the models that it calls, and how."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..shared.lora_names import LoraNames


@dataclass(frozen=True, kw_only=True)
class BlsSettings:
    """Names of the models that a BLS model calls, and how it works with them."""

    core: str
    lora: LoraNames
    inputs: frozenset[str] = frozenset()
    """The BLS model's own inputs."""
    outputs: tuple[str, ...] = ()
    """The BLS model's own outputs, without `text_output`."""
    accumulate: bool = False
    """Whether each streamed response holds the whole text so far."""
    exclude_input: bool = False
    """Whether the core model leaves the prompt out when a request does not say."""
    longest: int | None = None
    """max_seq_len of the engine: most tokens of prompt and answer, or None when it is unknown."""
    draft: str | None = None
    draft_longest: int | None = None
    """max_seq_len of the draft engine, or None when it is unknown."""
    preprocessing: str = "preprocessing"
    postprocessing: str = "postprocessing"
    pushed: bool = False
    """Whether the core model sends several answers to one call (NVIDIA's C++ backend), instead of being asked for
    each."""

    @property
    def always_indexed(self) -> bool:
        """Whether each answer has a batch_index: for clients of all releases, and in 0.12 and 0.13."""
        return {"seed", "random_seed"} <= self.inputs or "sequence_index" not in self.outputs

    @property
    def seed_input(self) -> str:
        """The release's name of the seed."""
        return "seed" if "seed" in self.inputs else "random_seed"

    @property
    def min_tokens_input(self) -> str:
        """The release's name of the minimum number of new tokens."""
        return "min_tokens" if "min_tokens" in self.inputs else "min_length"


def engine_length(repository: Path, model: str) -> int | None:
    """Return max_seq_len of the engine in the folder of `model`, or None when it is in another place."""
    try:
        config = json.loads((repository / model / "1" / "config.json").read_text(encoding="utf-8"))
        return int(config["build_config"]["max_seq_len"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""Options of `check`: what an artefact must satisfy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtserve.specs.options import Spec, option

CHECKPOINTS = "Checkpoints"


@dataclass(frozen=True, kw_only=True)
class CheckSpec(Spec):
    """The release that an artefact must fit, and prompts for a numerical check of a checkpoint and its original."""

    trtllm_version: str | None = option(
        None,
        metavar="VERSION",
        help="TensorRT-LLM that will load the checkpoint, or serve the repository (implies --machine).",
        common=True,
    )

    prompts: Path | None = option(
        None,
        metavar="FILE",
        help="One prompt per line, a text or a JSON list of token ids.",
        unset="a small built-in set of both",
        panel=CHECKPOINTS,
    )
    max_tokens: int = option(16, metavar="TOKENS", help="Length of each greedy answer.", minimum=1, panel=CHECKPOINTS)

    @property
    def compares(self) -> tuple[str, ...]:
        """The fields of the numerical check."""
        return ("prompts", "max_tokens")

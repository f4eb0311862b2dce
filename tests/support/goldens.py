"""Greedy tokens and logits recorded from transformers, for tests on machines without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tiny_models import write_tiny_model

FOLDER = Path(__file__).parent.parent / "golden"


@dataclass(frozen=True, kw_only=True)
class GoldenCase:
    """A prompt, its greedy continuation, and every `stride`-th logit of the last prompt token (float32)."""

    prompt: list[int]
    tokens: list[int]
    logits: list[float]
    stride: int


@dataclass(frozen=True, kw_only=True)
class Golden:
    """The recorded output of transformers for one tiny model in float32."""

    name: str
    model: dict[str, Any]
    cases: list[GoldenCase]
    script_sha256: str
    weights_sha256: str

    def write_model(self, folder: Path) -> Path:
        """Write the Hugging Face folder that the golden was recorded from."""
        return write_tiny_model(folder, **self.model)


def golden_names() -> list[str]:
    """Names of all recorded models."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if path.stem not in ("release_facts", "handover_schemas"))


def load_golden(name: str) -> Golden:
    """One recorded model."""
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    stride = content["logits_stride"]
    return Golden(
        name=name,
        model=content["model"],
        cases=[GoldenCase(**case, stride=stride) for case in content["cases"]],
        script_sha256=content["script_sha256"],
        weights_sha256=content["weights_sha256"],
    )

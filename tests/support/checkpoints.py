"""Checkpoints of tiny models, as `trtserve convert` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.stages import convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Checkpoint, Model
from trtserve.specs import ConvertSpec


def convert_tiny(folder: Path, *, overrides: dict[str, Any] | None = None, **options: Any) -> Checkpoint:
    """Convert a tiny float32 Llama; `overrides` change its config.json, `options` go to the conversion."""
    model = Model(path=write_tiny_model(folder / "model", **(overrides or {})))
    return convert_model(model, ConvertSpec(**({"dtype": "float32"} | options)), name="tiny", out=folder / "checkpoint")

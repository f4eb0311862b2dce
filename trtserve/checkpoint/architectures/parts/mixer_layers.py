"""Which layers of a model have a state instead of attention, in a checkpoint's config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtserve.checkpoint.architectures.base import HfConfig
from trtserve.checkpoint.architectures.parts.positions import layer_kinds
from trtserve.errors import UnsupportedModelError


def mixer_keys(hf: HfConfig, kind: str, *, default: Sequence[str] | None) -> dict[str, Any]:
    """Return the layers whose kind in `layer_types` is `kind`; the others attend.

    `default` has the kinds where config.json has no `layer_types`; None: all layers attend. Raises
    UnsupportedModelError for other kinds, and for a model without attention, whose cache has no blocks.
    """
    layers = int(hf["num_hidden_layers"])
    kinds = layer_kinds(hf, ("full_attention", kind)) or default or ["full_attention"] * layers
    if "full_attention" not in kinds:
        raise UnsupportedModelError(
            f"None of this model's {layers} layers has attention; our runtimes need one that has.",
            hint="The vllm runtime reads the model itself and may run it.",
        )
    return {"mixer_layers": [layer for layer, each in enumerate(kinds) if each == kind]}

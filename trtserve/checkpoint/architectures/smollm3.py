"""SmolLM3: Llama in which some layers have no positions."""

from __future__ import annotations

from typing import Any

from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import HfConfig
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, layer_flags, windows_of

_DEFAULTS = {"max_position_embeddings": 32768, "rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the layers without rotation: `no_rope_layers` has 0 for them, by default each fourth.

    A window is only for layers without rotation, unless `layer_types` overrides it.
    """
    layers, every = int(hf["num_hidden_layers"]), int(hf.get("no_rope_layer_interval") or 4)
    rotated = layer_flags(hf, "no_rope_layers") or [bool((layer + 1) % every) for layer in range(layers)]
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    kinds = attention_kinds(hf, lambda layer: not rotated[layer])
    config = llama.own_config(hf, "SmolLM3", defaults=_DEFAULTS, windows=windows_of(kinds, window))
    return config | {"unrotated_layers": [not turned for turned in rotated]}

"""OLMo 2 and 3: norms after attention and MLP, and over all query and key heads; OLMo 3 has windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, require_numbers
from trtserve.checkpoint.architectures.parts.positions import (
    attention_kinds,
    inverse_frequencies,
    rope_parameters,
    scaling_type,
    windows_of,
)
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS
from trtserve.errors import UnsupportedModelError

BRANCH_NORMS = {
    "post_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
}


_BASE = 500000.0


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config; OLMo 3 scales the rotation only in layers without a window."""
    if hf["architectures"][0] != "Olmo3ForCausalLM":
        return llama.own_config(hf, "OLMo 2", defaults={"rms_norm_eps": 1e-5})
    windows = windows_of(attention_kinds(hf, lambda layer: (layer + 1) % 4), hf.get("sliding_window", 4096))
    hf = {"rope_theta": _BASE, "rms_norm_eps": 1e-5} | _flat_rope(hf)
    config = llama.own_config(hf, "OLMo 3", defaults={}, windows=windows)
    return config | {"rope_local_base_freq": float(hf["rope_local_base_freq"] or _BASE)}


def _flat_rope(hf: HfConfig) -> dict[str, Any]:
    """Return `hf` with the rotation of layers without a window, and the base of the others as `rope_local_base_freq`.

    `rope_scaling` is for layers without a window; `rope_parameters` has one object for each kind of layer.
    """
    nested = rope_parameters({"rope_parameters": hf.get("rope_parameters")})
    if foreign := sorted(nested.keys() - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(f"config.json has {', '.join(foreign)} in rope_parameters, which no OLMo 3 has.")
    full, local = (
        rope_parameters({"rope_parameters": nested.get(kind)}) for kind in ("full_attention", "sliding_attention")
    )
    if scaling_type(local) != "default":
        raise UnsupportedModelError("This OLMo 3 scales the rotary embedding of layers with a window.")
    require_numbers(hf, "rope_theta")
    merged = {**full, **rope_parameters({"rope_scaling": hf.get("rope_scaling")})}
    if merged.get("truncate") is False:  # transformers 5.24 looks for it where nobody writes it
        raise UnsupportedModelError("config.json has truncate = false in its rotary scaling, which no OLMo 3 has.")
    base = local.get("rope_theta")
    if base is None and (hf.get("rope_theta") or _BASE) != _BASE:
        # transformers 5.24 rotates the layers with a window by its default then; other programs do not.
        raise UnsupportedModelError(f"config.json has rope_theta = {hf['rope_theta']}; an OLMo 3 has {_BASE:g}.")
    return {**hf, "rope_scaling": None, "rope_parameters": merged, "rope_local_base_freq": base}


def names(config: CheckpointConfig) -> SourceNames:
    return replace(llama.names(config), norms=BRANCH_NORMS, head_norms=HEAD_NORMS, head_norm_weights="row")


def decoder(config: CheckpointConfig) -> Decoder:
    local = config.own_or_none("rope_local_base_freq", float)
    return replace(
        llama.decoder(config),
        block="branch",
        qk_norm="all",
        local_rope_inv_freq=None if local is None else inverse_frequencies(config.head_size, local, None),
    )

"""OLMo 2 and 3, OLMoE and FlexOlmo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    Block,
    Decoder,
    HfConfig,
    SourceNames,
    moe_object,
    require_numbers,
    superset,
)
from trtserve.checkpoint.architectures.parts.expert_tensors import NOT_NORMALIZED, RENORMALIZED, expert_counts
from trtserve.checkpoint.architectures.parts.positions import (
    attention_kinds,
    inverse_frequencies,
    rope_parameters,
    scaling_type,
    windows_of,
)
from trtserve.checkpoint.architectures.qwen import QWEN_EXPERTS
from trtserve.errors import UnsupportedModelError

# OLMo 2 and 3: norms after attention and MLP, and over all query and key heads; OLMo 3 has windows.

BRANCH_NORMS = {
    "post_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
}


_BASE = 500000.0


def olmo2_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
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


def olmo2_names(config: CheckpointConfig) -> SourceNames:
    return replace(llama.names(config), norms=BRANCH_NORMS, head_norms=llama.HEAD_NORMS, head_norm_weights="row")


def olmo2_decoder(config: CheckpointConfig) -> Decoder:
    local = config.own_or_none("rope_local_base_freq", float)
    return replace(
        llama.decoder(config),
        block="branch",
        qk_norm="all",
        local_rope_inv_freq=None if local is None else inverse_frequencies(config.head_size, local, None),
    )


# OLMoE and FlexOlmo: Llama with experts, and norms over all heads; FlexOlmo has OLMo 2's norms after each part.

# transformers' defaults for absent keys.
_OLMOE = {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5}
_FLEX = {"num_experts": 7, "num_experts_per_tok": 5, "rms_norm_eps": 1e-6, "rope_theta": 500000.0}


def olmoe_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's sizes and the experts."""
    if hf.get("clip_qkv") is not None:
        raise UnsupportedModelError(f"config.json has clip_qkv = {hf['clip_qkv']}: clipped queries are not supported.")
    flex = hf["architectures"][0] == "FlexOlmoForCausalLM"
    hf = {**(_FLEX if flex else _OLMOE), **hf}
    experts, chosen = expert_counts(hf, "num_experts")
    mode = RENORMALIZED if hf.get("norm_topk_prob") else NOT_NORMALIZED
    common = llama.common_config(hf, longest=4096)
    return {
        **common,
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=mode),
        "attn_bias": bool(hf.get("attention_bias", False)),
        "post_norms": flex,
        **superset(*common.get("superset", ()), "norms over all heads"),
    }


def olmoe_names(config: CheckpointConfig) -> SourceNames:
    plain = replace(llama.names(config), head_norms=llama.HEAD_NORMS, head_norm_weights="row", experts=QWEN_EXPERTS)
    return replace(plain, norms=BRANCH_NORMS) if config.own("post_norms", False) else plain


def olmoe_decoder(config: CheckpointConfig) -> Decoder:
    block: Block = "branch" if config.own("post_norms", False) else "sequential"
    return replace(llama.expert_decoder(config), qk_norm="all", block=block)

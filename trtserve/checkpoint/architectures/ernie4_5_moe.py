"""ERNIE 4.5 with experts: ERNIE 4.5's attention, softmax routers with corrections, shared experts, dense layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import ernie4_5, llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, require_sizes
from trtserve.checkpoint.architectures.glm4_moe import EXPERTS
from trtserve.checkpoint.architectures.parts.expert_tensors import RENORMALIZED, expert_counts, softmax_experts
from trtserve.errors import UnsupportedModelError

# transformers' defaults for absent keys that differ from the dense model's.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "rope_theta": 500000.0,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 1536,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
}
# No sum of chosen probabilities comes near it.
_SMALLEST_SUM = 1e-9


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return ERNIE 4.5's config and the experts."""
    hf = {**_DEFAULTS, **hf}
    if hf.get("use_bias"):
        raise UnsupportedModelError("config.json has use_bias = true; no published ERNIE 4.5 with experts has it.")
    if not 0 <= hf["moe_norm_min"] <= _SMALLEST_SUM:
        raise UnsupportedModelError(f"config.json has moe_norm_min = {hf['moe_norm_min']}; expected 1e-12.")
    layers, first, last = int(hf["num_hidden_layers"]), hf["moe_layer_start_index"], hf["moe_layer_end_index"]
    every, last = hf["moe_layer_interval"], layers - 1 if last == -1 else last
    require_sizes(hf, "moe_layer_interval")
    counts = expert_counts({"num_experts": hf["moe_num_experts"], "num_experts_per_tok": hf["moe_k"]}, "num_experts")
    return {
        **ernie4_5.checkpoint_config(hf),
        **softmax_experts(hf, counts, RENORMALIZED, shared=hf["moe_num_shared_experts"] or 0),
        "dense_layers": [layer for layer in range(layers) if not first <= layer <= last or (layer + 1) % every],
    }


def names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; those of layers that predict more tokens are not used."""
    shared = EXPERTS.shared if config.moe_shared_expert_intermediate_size else None
    experts = replace(EXPERTS, shared=shared, correction="mlp.moe_statics.e_score_correction_bias")
    return replace(llama.NAMES, experts=experts, unused=(*llama.NAMES.unused, "model.mtp_*"))


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.expert_decoder(config), rope_interleaved=True)

"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import HfConfig, SourceNames, require_sizes
from trtserve.checkpoint.architectures.parts.expert_tensors import (
    DEEPSEEK_EXPERTS,
    RENORMALIZED,
    expert_counts,
    softmax_experts,
)
from trtserve.errors import UnsupportedModelError

# ERNIE 4.5 (dense): Llama that rotates neighbouring pairs.

_DEFAULTS = {
    "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config; `use_bias` is for all matrices."""
    biased = bool(hf.get("use_bias"))
    ernie = {**hf, "attention_bias": biased, "mlp_bias": biased}
    return llama.own_config(ernie, "ERNIE 4.5", defaults=_DEFAULTS)


decoder = llama.decoder_with(rope_interleaved=True)


# ERNIE 4.5 with experts: ERNIE 4.5's attention, softmax routers with corrections, shared experts, dense layers.

# transformers' defaults for absent keys that differ from the dense model's.
_ERNIE4_5_MOE: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": None, "rope_theta": 500000.0, "moe_k": 6, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_intermediate_size": 1536, "moe_layer_start_index": 1,
    "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12,
}  # fmt: skip
_SMALLEST_SUM = 1e-9  # no sum of chosen probabilities comes near it


def ernie4_5_moe_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return ERNIE 4.5's config and the experts."""
    hf = {**_ERNIE4_5_MOE, **hf}
    if hf.get("use_bias"):
        raise UnsupportedModelError("config.json has use_bias = true; no published ERNIE 4.5 with experts has it.")
    if not 0 <= hf["moe_norm_min"] <= _SMALLEST_SUM:
        raise UnsupportedModelError(f"config.json has moe_norm_min = {hf['moe_norm_min']}; expected 1e-12.")
    layers, first, last = int(hf["num_hidden_layers"]), hf["moe_layer_start_index"], hf["moe_layer_end_index"]
    every, last = hf["moe_layer_interval"], layers - 1 if last == -1 else last
    require_sizes(hf, "moe_layer_interval")
    counts = expert_counts({"num_experts": hf["moe_num_experts"], "num_experts_per_tok": hf["moe_k"]}, "num_experts")
    return {
        **checkpoint_config(hf),
        **softmax_experts(hf, counts, RENORMALIZED, shared=hf["moe_num_shared_experts"] or 0),
        "dense_layers": [layer for layer in range(layers) if not first <= layer <= last or (layer + 1) % every],
    }


def ernie4_5_moe_names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; those of layers that predict more tokens are not used."""
    shared = DEEPSEEK_EXPERTS.shared if config.moe_shared_expert_intermediate_size else None
    experts = replace(DEEPSEEK_EXPERTS, shared=shared, correction="mlp.moe_statics.e_score_correction_bias")
    return replace(llama.NAMES, experts=experts, unused=(*llama.NAMES.unused, "model.mtp_*"))


ernie4_5_moe_decoder = llama.decoder_with(experts=True, rope_interleaved=True)

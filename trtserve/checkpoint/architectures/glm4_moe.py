"""GLM-4.5 – 4.7 and Solar Open: sigmoid routers with corrections, a shared expert; GLM rotates a part of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, ExpertNames, HfConfig, SourceNames, superset
from trtserve.checkpoint.architectures.parts.expert_tensors import deepseek_experts
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS

EXPERTS = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    shared="mlp.shared_experts",
    correction="mlp.gate.e_score_correction_bias",
)
# transformers' defaults for absent keys. All layers of Solar Open have experts.
_GLM: dict[str, Any] = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
_SOLAR: dict[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's sizes, the experts, and what the attention has."""
    if solar := hf["architectures"][0] == "SolarOpenForCausalLM":
        hf = {**_SOLAR, **hf, "first_k_dense_replace": 0, "use_qk_norm": False}
        hf.setdefault("intermediate_size", hf["moe_intermediate_size"])
    else:
        hf = {**_GLM, **hf}
    common = llama.common_config(hf, longest=131072, partial=not solar)
    return {
        **common,
        **deepseek_experts(hf),
        "attn_bias": bool(hf.get("attention_bias", False)),
        "use_qk_norm": bool(hf.get("use_qk_norm", False)),
        **superset(*common.get("superset", ()), "sigmoid routers"),
    }


def names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; the layer after the last one predicts more tokens and is not used."""
    return replace(
        llama.NAMES,
        biases=frozenset({"qkv"} if config.own("attn_bias", False) else ()),
        head_norms=HEAD_NORMS if config.own("use_qk_norm", False) else {},
        experts=EXPERTS,
        unused=(*llama.NAMES.unused, f"model.layers.{config.num_hidden_layers}.*"),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.expert_decoder(config), qk_norm="heads" if config.own("use_qk_norm", False) else None)

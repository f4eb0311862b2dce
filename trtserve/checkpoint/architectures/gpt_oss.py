"""gpt-oss: experts with biases and a clamped gate, attention sinks, a window in every other layer.

Published as MXFP4, in which an expert's matrices are stored [out, in]; copies in floats store them [in, out].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    ClampedGate,
    Decoder,
    ExpertNames,
    HfConfig,
    SourceNames,
    moe_object,
    require_activation,
    superset,
)
from trtserve.checkpoint.architectures.parts.expert_tensors import (
    RENORMALIZED,
    expert_counts,
    experts_of,
    halves_apart,
)
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, window_keys, windows_of

_EXPERTS = ExpertNames(
    router="mlp.router",
    gate=None,
    up="mlp.experts.{}.gate_up_proj",
    down="mlp.experts.{}.down_proj",
    router_bias=True,
    biases=True,
)
# transformers' defaults for absent keys that differ from Llama's.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "max_position_embeddings": 131072, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's sizes, the experts and the windows."""
    hf = {**_DEFAULTS, **hf}
    if not hf.get("rope_scaling") and hf.get("rope_parameters") is None:
        hf["rope_scaling"] = _YARN
    require_activation(hf.get("hidden_act", "silu"), "silu")
    experts, chosen = expert_counts(hf, "num_local_experts")
    kinds = attention_kinds(hf, lambda layer: layer % 2 == 0)
    common = llama.common_config(hf, longest=131072)
    return {
        **common,
        "attn_bias": bool(hf["attention_bias"]),
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=RENORMALIZED),
        "moe_intermediate_size": common["intermediate_size"],
        "swiglu_alpha": float(hf["swiglu_alpha"]),
        "swiglu_limit": float(hf["swiglu_limit"]),
        **window_keys(windows_of(kinds, hf["sliding_window"])),
        **halves_apart(hf),
        **superset(*common.get("superset", ()), "attention sinks", "clamped gates and biases of experts"),
    }


def names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; those of experts are parts of one tensor (`source.read_source`).

    In a GGUF file gates and factors are tensors of their own (`halves_apart`).
    """
    if config.own("halves_apart", False):
        experts = replace(_EXPERTS, gate="mlp.experts.{}.gate_proj", up="mlp.experts.{}.up_proj")
    else:
        experts = replace(_EXPERTS, transposed=config.own("quant_method", "") != "mxfp4")
    return replace(llama.names(config), experts=experts, sinks="self_attn.sinks")


def decoder(config: CheckpointConfig) -> Decoder:
    clamp = ClampedGate(alpha=config.own("swiglu_alpha", 1.702), limit=config.own("swiglu_limit", 7.0))
    return replace(
        llama.expert_decoder(config),
        attention_sinks=True,
        experts=replace(experts_of(config), clamp=clamp, interleaved=not config.own("halves_apart", False)),
    )

"""Hunyuan: dense, with experts (A13B), and 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import HfConfig, SourceNames, WrongConfigError, required
from trtserve.checkpoint.architectures.parts.expert_tensors import (
    DEEPSEEK_EXPERTS,
    RENORMALIZED,
    deepseek_experts,
    expert_counts,
    layers_without_experts,
    softmax_experts,
)
from trtserve.checkpoint.architectures.parts.positions import rope_parameters, rotary, scaling_type
from trtserve.checkpoint.architectures.qwen import QWEN_EXPERTS
from trtserve.errors import UnsupportedModelError

# Hunyuan dense (0.5B to 7B): Llama whose queries and keys are normalised after rotation.

_HEAD_NORMS = {"attention.q_layernorm": "self_attn.query_layernorm", "attention.k_layernorm": "self_attn.key_layernorm"}


def hunyuan_v1_dense_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config. Scaling "dynamic" with an `alpha` means a larger base, whatever the length."""
    scaling = rope_parameters(hf)
    if scaling_type(scaling) == "dynamic" and scaling.get("alpha"):
        base, _ = rotary({**hf, "rope_scaling": None, "rope_parameters": {"rope_theta": scaling.get("rope_theta")}})
        size = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        base *= float(scaling["alpha"]) ** (size / max(size - 2, 1))
        hf = {**hf, "rope_scaling": None, "rope_parameters": {"rope_theta": base}}
    return llama.own_config({**hf, "mlp_bias": False}, "Hunyuan", defaults={"rms_norm_eps": 1e-5})


def hunyuan_v1_dense_names(config: CheckpointConfig) -> SourceNames:
    return replace(llama.names(config), head_norms=_HEAD_NORMS)


hunyuan_v1_dense_decoder = llama.decoder_with(qk_norm="rotated")


# Hunyuan with experts (A13B): the dense Hunyuan's attention, and a shared expert beside the chosen ones.


def hunyuan_v1_moe_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Hunyuan's config and the experts, whose numbers may be listed for each layer."""
    experts, chosen, shared = (
        _same(hf, key, default) for key, default in (("num_experts", 1), ("moe_topk", 1), ("num_shared_expert", 1))
    )
    inner = _same(hf, "moe_intermediate_size", required(hf, "intermediate_size")["intermediate_size"])
    if shared != 1 or inner != hf["intermediate_size"]:
        raise WrongConfigError(
            f"config.json has num_shared_expert = {shared}, moe_intermediate_size = {inner} and intermediate_size = "
            f"{hf['intermediate_size']}; expected one shared expert, and experts of that size."
        )
    counts = expert_counts({"num_experts": experts, "num_experts_per_tok": chosen}, "num_experts")
    return {
        **hunyuan_v1_dense_checkpoint_config(hf),
        **softmax_experts({"moe_intermediate_size": inner}, counts, RENORMALIZED, shared=1),
    }


def _same(hf: HfConfig, key: str, default: int) -> object:
    """Return a number that a list gives for each layer. Raises UnsupportedModelError where layers differ."""
    found = hf.get(key)
    listed = found if isinstance(found, list) else [default if found is None else found]
    if not listed or any(each != listed[0] for each in listed):
        raise UnsupportedModelError(f"config.json has {key} = {found!r:.80}; expected the same for all layers.")
    return listed[0]


def hunyuan_v1_moe_names(config: CheckpointConfig) -> SourceNames:
    experts = replace(QWEN_EXPERTS, router="mlp.gate.wg", shared="mlp.shared_mlp")
    return replace(hunyuan_v1_dense_names(config), experts=experts)


hunyuan_v1_moe_decoder = llama.decoder_with(experts=True, qk_norm="rotated")


# Hunyuan 3: Llama with normalised queries and keys, and DeepSeek V3's experts without groups.

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "rope_theta": 11158840.0, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
}  # fmt: skip


def hy_v3_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the experts, which all layers but the first have unless `mlp_layer_types` says more."""
    hf = {**_DEFAULTS, **hf}
    if hf.get("mlp_bias"):
        raise UnsupportedModelError("config.json has mlp_bias = true; expected a Hunyuan 3 without these biases.")
    experts = deepseek_experts(
        {
            **hf,
            "n_routed_experts": hf.get("num_experts") or hf.get("num_local_experts", 192),
            "n_shared_experts": hf["num_shared_experts"],
            "routed_scaling_factor": hf["router_scaling_factor"],
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
        }
    )
    return {**llama.own_config(hf, "Hunyuan 3", defaults={}, windows=()), **experts, **layers_without_experts(hf)}


def hy_v3_names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; the layer after the last one predicts more tokens and is not used."""
    plain = llama.names(config)
    shared = "mlp.shared_mlp" if config.moe_shared_expert_intermediate_size else None
    return replace(
        plain,
        head_norms=llama.HEAD_NORMS,
        experts=replace(DEEPSEEK_EXPERTS, router="mlp.router.gate", correction="mlp.expert_bias", shared=shared),
        unused=(*plain.unused, f"model.layers.{config.num_hidden_layers}.*"),
    )


hy_v3_decoder = llama.decoder_with(experts=True, qk_norm="heads")

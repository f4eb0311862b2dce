"""Granite 3 and 4, HyperCLOVA X and Bamba."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    Decoder,
    ExpertNames,
    HfConfig,
    SourceNames,
    WrongConfigError,
    moe_object,
    require_activation,
    required,
)
from trtserve.checkpoint.architectures.parts.expert_tensors import RENORMALIZED, expert_counts, experts_of
from trtserve.checkpoint.architectures.parts.state_space import (
    MAMBA_DEFAULTS,
    mamba_keys,
    mixer_keys,
    state_space,
    state_space_tensors,
)

# Granite 3 and HyperCLOVA X: Llama with factors for embeddings, attention, residuals and logits.

_SANDWICH = {
    "input_layernorm": "input_layernorm",
    "post_layernorm": "post_norm1",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_norm2",
}
_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the factors under transformers' names.

    Granite's logits are divided by `logits_scaling`, those of HyperCLOVA X multiplied; and this has norms on both sides
    of attention and MLP, unless `use_post_norm` is false.
    """
    korean = hf["architectures"][0] == "HyperCLOVAXForCausalLM"
    config = llama.own_config(hf, "HyperCLOVA X" if korean else "Granite", defaults={})
    factors = {key: float(hf.get(key) or 1.0) for key in _FACTORS}
    if not korean:
        return config | factors
    if hf.get("attention_multiplier") is None:
        factors["attention_multiplier"] = config["head_size"] ** -0.5
    own = {"logits_multiplied": True, "inter_layernorms": bool(hf.get("use_post_norm", True))}
    return config | factors | own


def names(config: CheckpointConfig) -> SourceNames:
    plain = llama.names(config)
    return replace(plain, norms=_SANDWICH) if config.own("inter_layernorms", False) else plain


def decoder(config: CheckpointConfig) -> Decoder:
    logits, multiplied = config.own("logits_scaling", 1.0), config.own("logits_multiplied", False)
    return replace(
        llama.decoder(config),
        attention_scale=config.own("attention_multiplier", 1.0),
        embedding_scale=config.own("embedding_multiplier", 1.0),
        residual_scale=config.own("residual_multiplier", 1.0),
        logits_scale=logits if multiplied else 1 / logits,
        block="sandwich" if config.own("inter_layernorms", False) else "sequential",
    )


# Granite 3 with experts: Granite's factors, and experts as in Granite 4, with a shared one or without.

# transformers' defaults for absent keys.
_GRANITE_MOE: dict[str, Any] = {
    "intermediate_size": 11008, "max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
}  # fmt: skip


def granite_moe_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Granite's config and the experts."""
    hf = {**_GRANITE_MOE, **hf}
    require_activation(hf.get("hidden_act", "silu"), "silu")
    shared = hf["shared_intermediate_size"] or 0 if hf["architectures"][0] == "GraniteMoeSharedForCausalLM" else 0
    return {**checkpoint_config(hf), **routed(hf, shared)}


def granite_moe_names(config: CheckpointConfig) -> SourceNames:
    shared = config.moe_shared_expert_intermediate_size
    return replace(llama.names(config), experts=SHARED_EXPERTS if shared else EXPERTS)


def granite_moe_decoder(config: CheckpointConfig) -> Decoder:
    described = decoder(replace(config, hidden_act="silu"))
    return replace(described, mlp="experts", experts=experts_of(config))


# Granite 4 (hybrid): Granite's factors, state spaces in most layers, no positions in the others, an MLP or experts.

# transformers' defaults for absent keys.
_GRANITE_HYBRID: dict[str, Any] = {
    **MAMBA_DEFAULTS,
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
}
_OLD = {"mamba": "linear_attention", "attention": "full_attention"}
EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    gate=None,
    up="block_sparse_moe.experts.{}.input_linear",
    down="block_sparse_moe.experts.{}.output_linear",
    gate_first=True,
)
SHARED_EXPERTS = replace(EXPERTS, shared="shared_mlp", shared_fused=True)


def granite_hybrid_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Granite's config, the state spaces, and the experts; the MLP is a shared expert where there are some."""
    hf = {**_GRANITE_HYBRID, **hf}
    kinds = hf.get("layer_types") or ["linear_attention"] * hf["num_hidden_layers"]
    hf["layer_types"] = [_OLD.get(kind, kind) for kind in kinds]
    require_activation(hf.get("hidden_act", "silu"), "silu")
    positions = hf.get("position_embedding_type")
    if positions not in (None, "rope", "nope"):
        raise WrongConfigError(f"config.json has position_embedding_type = {positions!r}; expected rope, nope or null.")
    required(hf, "hidden_size", "shared_intermediate_size", "mamba_expand")
    shared, inner = hf["shared_intermediate_size"], hf["mamba_expand"] * hf["hidden_size"]
    own_width = hf.get("intermediate_size", 11008)
    experts = routed({**hf, "intermediate_size": own_width}, shared) if hf["num_local_experts"] else {}
    return {
        **checkpoint_config({**hf, "layer_types": None, "intermediate_size": own_width if experts else shared}),
        **mixer_keys(hf, "linear_attention", default=None),
        **mamba_keys(hf, inner, norm_groups=hf["mamba_n_groups"]),
        **({"unrotated_layers": [True]} if positions != "rope" else {}),
        **experts,
    }


def routed(hf: HfConfig, shared: int) -> dict[str, Any]:
    """Return the keys of experts, beside a shared one of `shared` units, or none for 0."""
    experts, chosen = expert_counts(hf, "num_local_experts")
    return {
        "hidden_act": "swiglu",
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=RENORMALIZED, shared_size=shared),
        "moe_intermediate_size": hf["intermediate_size"],
        "moe_shared_expert_intermediate_size": shared,
        "shared_expert_gate": False,
    }


def granite_hybrid_names(config: CheckpointConfig) -> SourceNames:
    plain = replace(llama.names(config), mixer=state_space_tensors(config, "mamba."))
    if config.moe.num_experts:
        return replace(plain, experts=SHARED_EXPERTS)
    return replace(plain, fc="shared_mlp.input_linear", gate=None, gate_up=True, proj="shared_mlp.output_linear")


def granite_hybrid_decoder(config: CheckpointConfig) -> Decoder:
    described = decoder(replace(config, hidden_act="silu"))
    experts = experts_of(config) if config.moe.num_experts else None
    return replace(
        described,
        mlp="experts" if experts else "fused",
        experts=experts,
        mixer=state_space(config),
        mixer_layers=frozenset(config.mixer_layers),
    )


# Bamba: a Llama that rotates half of each head, with state spaces in most layers.

# transformers' defaults for absent keys.
_BAMBA: dict[str, Any] = {
    **MAMBA_DEFAULTS,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "attn_layer_indices": None,
}


def bamba_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the state spaces. As in transformers, half of each head rotates, unless config.json
    says otherwise with the rotary parameters."""
    hf = {**_BAMBA, **hf, "partial_rotary_factor": 0.5}
    sizes = required(hf, "num_hidden_layers", "hidden_size", "mamba_expand")
    attends = hf["attn_layer_indices"]
    if not isinstance(attends, list) or any(type(layer) is not int for layer in attends):
        raise WrongConfigError(
            f"config.json has attn_layer_indices = {attends!r:.80}; expected a list of the layers with attention."
        )
    require_activation(hf.get("hidden_act", "silu"), "silu")
    hf["layer_types"] = [
        "full_attention" if layer in attends else "linear_attention" for layer in range(sizes["num_hidden_layers"])
    ]
    return {
        **llama.own_config(hf, "Bamba", defaults={}, partial=True, windows=()),
        **mixer_keys(hf, "linear_attention", default=None),
        **mamba_keys(hf, sizes["mamba_expand"] * sizes["hidden_size"], norm_groups=hf["mamba_n_groups"]),
    }


def bamba_names(config: CheckpointConfig) -> SourceNames:
    return replace(
        llama.names(config),
        norms={"input_layernorm": "input_layernorm", "post_layernorm": "pre_ff_layernorm"},
        fc="feed_forward.gate_proj",
        gate="feed_forward.up_proj",
        proj="feed_forward.down_proj",
        final_norm="model.final_layernorm",
        mixer=state_space_tensors(config, "mamba."),
    )


def bamba_decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.decoder(config), mixer=state_space(config), mixer_layers=frozenset(config.mixer_layers))

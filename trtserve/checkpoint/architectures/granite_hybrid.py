"""Granite 4 (hybrid): Granite's factors, state spaces in most layers, no positions in the others, an MLP or experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import granite, llama
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
from trtserve.checkpoint.architectures.parts.mixer_layers import mixer_keys
from trtserve.checkpoint.architectures.parts.state_space import (
    MAMBA_DEFAULTS,
    mamba_keys,
    state_space,
    state_space_tensors,
)

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
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


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Granite's config, the state spaces, and the experts; the MLP is a shared expert where there are some."""
    hf = {**_DEFAULTS, **hf}
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
        **granite.checkpoint_config({**hf, "layer_types": None, "intermediate_size": own_width if experts else shared}),
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


def names(config: CheckpointConfig) -> SourceNames:
    plain = replace(llama.names(config), mixer=state_space_tensors(config, "mamba."))
    if config.moe.num_experts:
        return replace(plain, experts=SHARED_EXPERTS)
    return replace(plain, fc="shared_mlp.input_linear", gate=None, gate_up=True, proj="shared_mlp.output_linear")


def decoder(config: CheckpointConfig) -> Decoder:
    described = granite.decoder(replace(config, hidden_act="silu"))
    experts = experts_of(config) if config.moe.num_experts else None
    return replace(
        described,
        mlp="experts" if experts else "fused",
        experts=experts,
        mixer=state_space(config),
        mixer_layers=frozenset(config.mixer_layers),
    )

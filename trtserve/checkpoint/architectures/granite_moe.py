"""Granite 3 with experts: Granite's factors, and experts as in Granite 4, with a shared one or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import granite, llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, require_activation
from trtserve.checkpoint.architectures.granite_hybrid import EXPERTS, SHARED_EXPERTS, routed
from trtserve.checkpoint.architectures.parts.expert_tensors import experts_of

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Granite's config and the experts."""
    hf = {**_DEFAULTS, **hf}
    require_activation(hf.get("hidden_act", "silu"), "silu")
    shared = hf["shared_intermediate_size"] or 0 if hf["architectures"][0] == "GraniteMoeSharedForCausalLM" else 0
    return {**granite.checkpoint_config(hf), **routed(hf, shared)}


def names(config: CheckpointConfig) -> SourceNames:
    shared = config.moe_shared_expert_intermediate_size
    return replace(llama.names(config), experts=SHARED_EXPERTS if shared else EXPERTS)


def decoder(config: CheckpointConfig) -> Decoder:
    described = granite.decoder(replace(config, hidden_act="silu"))
    return replace(described, mlp="experts", experts=experts_of(config))

"""Mistral, Mixtral, Ministral and CWM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    Decoder,
    ExpertNames,
    HfConfig,
    QueryGrowth,
    moe_object,
    require_activation,
    require_numbers,
    require_sizes,
)
from trtserve.checkpoint.architectures.parts.expert_tensors import RENORMALIZED, expert_counts
from trtserve.checkpoint.architectures.parts.positions import (
    attention_kinds,
    layer_kinds,
    rope_parameters,
    uniform_window,
    window_keys,
    windows_of,
)

# Mistral: Llama with a sliding window.

_DEFAULT_WINDOW = 4096  # transformers' default for an absent key; null in the config disables the window


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the windows; with `layer_types` transformers computes a Mistral as a Ministral."""
    window, kinds = hf.get("sliding_window", _DEFAULT_WINDOW), layer_kinds(hf)
    windows = [window] if kinds is None else windows_of(kinds, window)
    return llama.checkpoint_config({**hf, "layer_types": None}) | window_keys(windows)


# Mixtral: Mistral with experts instead of the MLP.

MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)
# transformers' defaults for absent keys that differ from Llama's.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
mixtral_decoder = llama.expert_decoder


def mixtral_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the experts and the window."""
    hf = {**_DEFAULTS, **hf}
    require_activation(hf.get("hidden_act", "silu"), "silu")
    experts, chosen = expert_counts(hf, "num_local_experts")
    return {
        **llama.checkpoint_config({**hf, "layer_types": None}),
        "hidden_act": "swiglu",
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=RENORMALIZED),
        **uniform_window(hf, hf.get("sliding_window")),
    }


mixtral_names = replace(llama.NAMES, experts=MIXTRAL_EXPERTS)


# Ministral, Ministral 3 and CWM: Llama with windows in some layers, or with queries that grow with their position.

# transformers' defaults; Ministral 3 has yarn, CWM has llama3.
_MINISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
_CWM = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_theta": 1e6,
        "rope_type": "llama3",
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}

_MINISTRAL_3 = {
    **_CWM,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_theta": 1e6,
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def ministral_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the windows, and how queries grow."""
    name = hf["architectures"][0]
    cwm = name == "CwmForCausalLM"
    if hf.get("rope_parameters") is None:  # null is the default, too
        hf = {key: value for key, value in hf.items() if key != "rope_parameters"}
    plain = {**hf, "attention_bias": False, **({} if cwm else {"mlp_bias": False})}
    if name == "Ministral3ForCausalLM":
        return _ministral3(plain)
    kinds = attention_kinds(hf, lambda layer: layer % 4 or not cwm)
    windows = windows_of(kinds, hf.get("sliding_window", 8192 if cwm else 4096))
    if cwm:
        return llama.own_config(plain, "CWM", defaults=_CWM, windows=windows)
    return llama.own_config(plain, "Ministral", defaults=_MINISTRAL, windows=windows)


def _ministral3(hf: HfConfig) -> dict[str, Any]:
    hf = {**_MINISTRAL_3, **hf, "layer_types": None}
    window, parameters = hf.get("sliding_window"), rope_parameters(hf)
    config = llama.own_config(hf, "Ministral 3", defaults={}, windows=[window])
    beta = parameters.get("llama_4_scaling_beta")
    if beta is None:
        return config
    growth = {"beta": beta, "every": parameters.get("original_max_position_embeddings")}
    require_numbers(growth, "beta")
    require_sizes(growth, "every")
    return config | {"llama_4_scaling_beta": float(beta), "original_max_position_embeddings": growth["every"]}


def ministral_decoder(config: CheckpointConfig) -> Decoder:
    beta = config.own_or_none("llama_4_scaling_beta", float)
    every = config.original_max_position_embeddings
    return replace(llama.decoder(config), query_growth=None if beta is None else QueryGrowth(beta=beta, every=every))

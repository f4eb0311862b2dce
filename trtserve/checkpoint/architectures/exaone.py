"""EXAONE 3 and 3.5: Llama under names of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import HfConfig, SourceNames

_DEFAULTS = {"max_position_embeddings": 4096, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
# EXAONE's keys of config.json, and Llama's.
_KEYS = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config."""
    return llama.own_config({_KEYS.get(key, key): value for key, value in hf.items()}, "EXAONE 3", defaults=_DEFAULTS)


def names(config: CheckpointConfig) -> SourceNames:
    plain = llama.names(config)
    return replace(
        plain,
        embedding="transformer.wte",
        layer="transformer.h.{}.",
        norms={"input_layernorm": "ln_1", "post_layernorm": "ln_2"},
        qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
        dense="attn.attention.out_proj",
        fc="mlp.c_fc_0",
        gate="mlp.c_fc_1",
        proj="mlp.c_proj",
        final_norm="transformer.ln_f",
        unused=("transformer.h.*.attn.attention.rotary.inv_freq",),
    )

"""Apertus: Llama with a plain MLP of xIELU, whose two numbers each layer has learned, and norms of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS
from trtserve.errors import UnsupportedModelError

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 12e6}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the activation."""
    if (activation := hf.get("hidden_act", "xielu")) != "xielu":
        raise UnsupportedModelError(f"config.json has hidden_act = {activation!r:.40}; an Apertus has xielu.")
    if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
        hf = {**hf, "rope_parameters": _ROPE}
    config = llama.own_config({**hf, "hidden_act": "silu", "mlp_bias": False}, "Apertus", defaults=_DEFAULTS)
    return config | {"hidden_act": "xielu"}


def names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; xIELU's other two numbers are the same everywhere."""
    return replace(
        llama.names(config),
        norms={"input_layernorm": "attention_layernorm", "post_layernorm": "feedforward_layernorm"},
        head_norms=HEAD_NORMS,
        fc="mlp.up_proj",
        gate=None,
        xielu=("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n"),
        unused=(*llama.NAMES.unused, "model.layers.*.mlp.act_fn.beta", "model.layers.*.mlp.act_fn.eps"),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    plain = llama.decoder(replace(config, hidden_act="silu"))
    return replace(plain, mlp="plain", activation="xielu", qk_norm="heads")

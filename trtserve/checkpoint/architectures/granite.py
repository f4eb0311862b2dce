"""Granite 3 and HyperCLOVA X: Llama with factors for embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames

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

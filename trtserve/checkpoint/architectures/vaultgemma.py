"""VaultGemma: Gemma 2 without the norms after attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import gemma, gemma2
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, require_activation, superset


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Gemma 2's config; `hidden_activation` is the only key of the activation."""
    activation = hf.get("hidden_activation") or "gelu_pytorch_tanh"
    require_activation(activation, "gelu_tanh")
    config = gemma2.checkpoint_config({**hf, "hidden_act": "gelu_pytorch_tanh"})
    return {
        **config,
        "inter_layernorms": False,
        **superset("the family VaultGemma", *config.get("superset", ())),
    }


def names(config: CheckpointConfig) -> SourceNames:
    norms = {"input_layernorm": "input_layernorm", "post_layernorm": "pre_feedforward_layernorm"}
    return replace(gemma.names(config), norms=norms)


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(gemma2.decoder(config), block="sequential")

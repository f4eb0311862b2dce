"""Nemotron (dense), Arcee and Jais 2: Llama with a plain MLP of squared ReLU; Nemotron and Jais have layer norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames

_NEMOTRON = {"partial_rotary_factor": 0.5, "max_position_embeddings": 4096, "hidden_act": "relu2"}
_ARCEE = {"max_position_embeddings": 4096, "hidden_act": "relu2", "rms_norm_eps": 1e-5}
_JAIS = {"max_position_embeddings": 8192, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the kind of norm; a Nemotron's multiply by 1 + weight."""
    if hf["architectures"][0] == "NemotronForCausalLM":
        own = {"layer_norms": True, "norm_epsilon": hf.get("norm_eps", 1e-5), "norm_offset": 1.0}
        return llama.own_config(hf, "Nemotron", defaults=_NEMOTRON, partial=True) | own
    if hf["architectures"][0] == "Jais2ForCausalLM":
        own = {"layer_norms": True, "norm_epsilon": hf.get("layer_norm_eps", 1e-5)}
        return llama.own_config(hf, "Jais 2", defaults=_JAIS) | own
    return llama.own_config(hf, "Arcee", defaults=_ARCEE)


def names(config: CheckpointConfig) -> SourceNames:
    plain = llama.names(config)
    return replace(
        plain,
        fc="mlp.up_proj",
        gate=None,
        norm_biases=config.own("layer_norms", False),
        norm_offset=config.own("norm_offset", 0.0),
        biases=plain.biases - {"gate"},
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.decoder(config), mlp="plain", norm="layer" if config.own("layer_norms", False) else "rms")

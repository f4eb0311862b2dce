"""Command R and A (Cohere and Cohere 2): layer norms without biases, attention beside the MLP, neighbouring pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, windows_of
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS

_DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": True}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and Cohere's factor of logits; in Cohere 2 layers without a window have no positions."""
    own = {
        "norm_epsilon": hf.get("layer_norm_eps", 1e-5),
        "logit_scale": float(hf.get("logit_scale", 0.0625)),
    }
    if hf["architectures"][0] != "Cohere2ForCausalLM":
        defaults = _DEFAULTS | {"rope_theta": 5e5}
        return llama.own_config(hf, "Cohere", defaults=defaults) | own | {"qk_layernorm": bool(hf.get("use_qk_norm"))}
    every = int(hf.get("sliding_window_pattern") or 4)
    kinds = attention_kinds(hf, lambda layer: (layer + 1) % every)
    windows = windows_of(kinds, hf.get("sliding_window", 4096))
    config = llama.own_config(hf, "Cohere 2", defaults=_DEFAULTS, windows=windows)
    return config | own | {"unrotated_layers": [window is None for window in windows]}


def names(config: CheckpointConfig) -> SourceNames:
    head_norms = HEAD_NORMS if config.own("qk_layernorm", False) else {}
    return replace(
        llama.names(config),
        norms={"input_layernorm": "input_layernorm"},
        head_norms=head_norms,
        head_norm_weights="each",
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(
        llama.decoder(config),
        norm="layer",
        block="parallel",
        mlp_norm=None,
        rope_interleaved=True,
        qk_norm="heads" if config.own("qk_layernorm", False) else None,
        logits_scale=config.own("logit_scale", 1.0),
    )

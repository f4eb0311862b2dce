"""Bamba: a Llama that rotates half of each head, with state spaces in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    SourceNames,
    WrongConfigError,
    require_activation,
    required,
)
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
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "attn_layer_indices": None,
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the state spaces. As in transformers, half of each head rotates, unless config.json
    says otherwise with the rotary parameters."""
    hf = {**_DEFAULTS, **hf, "partial_rotary_factor": 0.5}
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


def names(config: CheckpointConfig) -> SourceNames:
    return replace(
        llama.names(config),
        norms={"input_layernorm": "input_layernorm", "post_layernorm": "pre_ff_layernorm"},
        fc="feed_forward.gate_proj",
        gate="feed_forward.up_proj",
        proj="feed_forward.down_proj",
        final_norm="model.final_layernorm",
        mixer=state_space_tensors(config, "mamba."),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return replace(llama.decoder(config), mixer=state_space(config), mixer_layers=frozenset(config.mixer_layers))

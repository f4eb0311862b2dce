"""Falcon-H1: every layer has attention and a state space side by side, and nearly everything has a factor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    SourceNames,
    require_activation,
    require_numbers,
    required,
)
from trtserve.checkpoint.architectures.parts.state_space import (
    FACTORS,
    MAMBA_DEFAULTS,
    mamba_keys,
    state_space,
    state_space_tensors,
)
from trtserve.errors import UnsupportedModelError

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    **MAMBA_DEFAULTS,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "projectors_bias": False,
}
_SCALARS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
_LISTS = {"mlp_multipliers": ("gate", "down"), "ssm_multipliers": FACTORS}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the state spaces, and the factors."""
    hf = {**_DEFAULTS, **hf}
    required(hf, "num_hidden_layers", "hidden_size", "mamba_expand")
    require_activation(hf.get("hidden_act", "silu"), "silu")  # of the convolutions too
    own = None if hf["mamba_d_ssm"] is None else required(hf, "mamba_d_ssm")["mamba_d_ssm"]
    inner = own or hf["mamba_expand"] * hf["hidden_size"]
    factors = _factors(hf)
    biased = {key: bool(hf[key]) for key in ("mamba_proj_bias", "projectors_bias")}
    if len(set(biased.values())) > 1 or (biased["mamba_proj_bias"] and factors["ssm_in"] != 1):
        raise UnsupportedModelError("config.json gives some products of the state spaces biases, and others none.")
    if hf.get("attention_bias") and factors["attention_in"] != 1:
        raise UnsupportedModelError("config.json has attention_bias = true and a factor of attention's inputs.")
    return {
        **llama.own_config(hf, "Falcon-H1", defaults={}, windows=()),
        "mixer_layers": list(range(hf["num_hidden_layers"])),
        "mixer_beside": True,
        **mamba_keys(
            hf,
            inner,
            norm_groups=hf["mamba_n_groups"] if hf["mamba_rms_norm"] else 0,
            norm_first=bool(hf["mamba_norm_before_gate"]),
        ),
        **{f"ssm_{part}_factor": factors["ssm_in"] * factors[part] for part in FACTORS},
        "ssm_out_multiplier": factors["ssm_out"],
        "mlp_gate_multiplier": factors["mlp_gate"],
        "mlp_down_multiplier": factors["mlp_down"],
        "embedding_multiplier": factors["embedding"],
        "lm_head_multiplier": factors["lm_head"],
        # The factor of attention's inputs meets queries, keys and values.
        "key_multiplier": factors["key"] * factors["attention_in"] ** 2,
        "attention_out_multiplier": factors["attention_out"] * factors["attention_in"],
    }


def _factors(hf: HfConfig) -> dict[str, float]:
    """Return all factors. Raises UnsupportedModelError for one that is not a positive number."""
    found = {part: hf.get(f"{part}_multiplier") for part in _SCALARS}
    for key, parts in _LISTS.items():
        values = hf.get(key) or [1.0] * len(parts)
        if not isinstance(values, list) or len(values) != len(parts):
            raise UnsupportedModelError(f"config.json has {key} = {values!r:.80}; expected {len(parts)} numbers.")
        found |= {
            f"mlp_{part}" if key.startswith("mlp") else part: each for part, each in zip(parts, values, strict=True)
        }
    require_numbers(found, *found)
    return {key: 1.0 if value is None else float(value) for key, value in found.items()}


def names(config: CheckpointConfig) -> SourceNames:
    parts = {part: f"feed_forward.{name}_proj" for part, name in {"fc": "gate", "gate": "up", "proj": "down"}.items()}
    return replace(
        llama.names(config),
        norms={"input_layernorm": "input_layernorm", "post_layernorm": "pre_ff_layernorm"},
        fc=parts["fc"],
        gate=parts["gate"],
        proj=parts["proj"],
        final_norm="model.final_layernorm",
        mixer=state_space_tensors(config, "mamba."),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    plain = llama.decoder(config)
    return replace(
        plain,
        attention_scale=plain.attention_scale * config.own("key_multiplier", 1.0),
        attention_factor=config.own("attention_out_multiplier", 1.0),
        gate_factor=config.own("mlp_gate_multiplier", 1.0),
        mlp_factor=config.own("mlp_down_multiplier", 1.0),
        embedding_scale=config.own("embedding_multiplier", 1.0),
        logits_scale=config.own("lm_head_multiplier", 1.0),
        mixer=state_space(config),
        mixer_layers=frozenset(config.mixer_layers),
        mixer_beside=True,
    )

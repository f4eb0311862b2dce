"""Families that are Llama but for a few lines: Apertus, Cohere, Helium, InternLM 3, Seed-OSS, SmolLM3, StableLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import ernie4_5, llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, Part, SourceNames, WrongConfigError
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, layer_flags, windows_of
from trtserve.errors import UnsupportedModelError

# Apertus: Llama with a plain MLP of xIELU, whose two numbers each layer has learned, and norms of each head.

# transformers' defaults for absent keys.
_APERTUS: dict[str, Any] = {"max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 12e6}
_ROPE = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


def apertus_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the activation."""
    if (activation := hf.get("hidden_act", "xielu")) != "xielu":
        raise UnsupportedModelError(f"config.json has hidden_act = {activation!r:.40}; an Apertus has xielu.")
    if hf.get("rope_scaling") is None and hf.get("rope_parameters") is None:
        hf = {**hf, "rope_parameters": _ROPE}
    config = llama.own_config({**hf, "hidden_act": "silu", "mlp_bias": False}, "Apertus", defaults=_APERTUS)
    return config | {"hidden_act": "xielu"}


def apertus_names(config: CheckpointConfig) -> SourceNames:
    """Return the names of the source tensors; xIELU's other two numbers are the same everywhere."""
    return replace(
        llama.names(config),
        norms={"input_layernorm": "attention_layernorm", "post_layernorm": "feedforward_layernorm"},
        head_norms=llama.HEAD_NORMS,
        fc="mlp.up_proj",
        gate=None,
        xielu=("mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n"),
        unused=(*llama.NAMES.unused, "model.layers.*.mlp.act_fn.beta", "model.layers.*.mlp.act_fn.eps"),
    )


def apertus_decoder(config: CheckpointConfig) -> Decoder:
    plain = llama.decoder(replace(config, hidden_act="silu"))
    return replace(plain, mlp="plain", activation="xielu", qk_norm="heads")


# Command R and A (Cohere and Cohere 2): layer norms without biases, attention beside the MLP, neighbouring pairs.

_COHERE = {"max_position_embeddings": 8192, "tie_word_embeddings": True}


def cohere_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and Cohere's factor of logits; in Cohere 2 layers without a window have no positions."""
    own = {"norm_epsilon": hf.get("layer_norm_eps", 1e-5), "logit_scale": float(hf.get("logit_scale", 0.0625))}
    if hf["architectures"][0] != "Cohere2ForCausalLM":
        defaults = _COHERE | {"rope_theta": 5e5}
        return llama.own_config(hf, "Cohere", defaults=defaults) | own | {"qk_layernorm": bool(hf.get("use_qk_norm"))}
    every = int(hf.get("sliding_window_pattern") or 4)
    kinds = attention_kinds(hf, lambda layer: (layer + 1) % every)
    windows = windows_of(kinds, hf.get("sliding_window", 4096))
    config = llama.own_config(hf, "Cohere 2", defaults=_COHERE, windows=windows)
    return config | own | {"unrotated_layers": [window is None for window in windows]}


def cohere_names(config: CheckpointConfig) -> SourceNames:
    head_norms = llama.HEAD_NORMS if config.own("qk_layernorm", False) else {}
    return replace(
        llama.names(config),
        norms={"input_layernorm": "input_layernorm"},
        head_norms=head_norms,
        head_norm_weights="each",
    )


def cohere_decoder(config: CheckpointConfig) -> Decoder:
    return replace(
        llama.decoder(config),
        norm="layer",
        block="parallel",
        mlp_norm=None,
        rope_interleaved=True,
        qk_norm="heads" if config.own("qk_layernorm", False) else None,
        logits_scale=config.own("logit_scale", 1.0),
    )


# Helium: Llama that rotates neighbouring pairs, with biases of queries, keys and values only.

_HELIUM = {"max_position_embeddings": 4096, "head_dim": 128, "rope_theta": 1e5, "rms_norm_eps": 1e-8}
helium_decoder = ernie4_5.decoder


def helium_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config."""
    return llama.own_config(hf, "Helium", defaults=_HELIUM)


def helium_names(config: CheckpointConfig) -> SourceNames:
    plain = llama.names(config)
    return replace(plain, biases=plain.biases - {"dense"})


# InternLM 3 and IQuest-Coder: Llama under other names.

_INTERNLM = {"max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}
_IQUEST = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}


def internlm3_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config. transformers computes these models as Llamas, and refuses what a Llama has not."""
    if hf["architectures"][0] == "IQuestCoderForCausalLM":
        if hf.get("clip_qkv") is not None or hf.get("use_sliding_window"):
            raise WrongConfigError("This IQuest-Coder sets clip_qkv or use_sliding_window; no published one does.")
        return llama.own_config(hf, "IQuest-Coder", defaults=_IQUEST)
    inner, outer = bool(hf.get("qkv_bias", hf.get("attention_bias"))), bool(hf.get("bias", hf.get("mlp_bias")))
    if inner != outer:
        raise WrongConfigError(
            f"This InternLM 3 has qkv_bias = {inner} and bias = {outer}; no published one differs in them."
        )
    return llama.own_config({**hf, "attention_bias": inner, "mlp_bias": inner}, "InternLM 3", defaults=_INTERNLM)


# Seed-OSS: Llama whose queries, keys and values, and outputs of attention have biases each for itself.

_SEED_OSS = {
    "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
}  # fmt: skip


def seed_oss_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and whether the outputs of attention have a bias."""
    config = llama.own_config(hf, "Seed-OSS", defaults=_SEED_OSS)
    return config | {"attention_out_bias": bool(hf.get("attention_out_bias", False))}


def seed_oss_names(config: CheckpointConfig) -> SourceNames:
    biases: dict[Part, bool] = {
        "qkv": config.own("attn_bias", False),
        "dense": config.own("attention_out_bias", False),
        **dict.fromkeys(("fc", "gate", "proj"), config.own("mlp_bias", False)),
    }
    return replace(llama.NAMES, biases=frozenset(part for part, biased in biases.items() if biased))


# SmolLM3: Llama in which some layers have no positions.

_SMOLLM3 = {
    "max_position_embeddings": 32768, "rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip


def smollm3_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config and the layers without rotation: `no_rope_layers` has 0 for them, by default each fourth.

    A window is only for layers without rotation, unless `layer_types` overrides it.
    """
    layers, every = int(hf["num_hidden_layers"]), int(hf.get("no_rope_layer_interval") or 4)
    rotated = layer_flags(hf, "no_rope_layers") or [bool((layer + 1) % every) for layer in range(layers)]
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    kinds = attention_kinds(hf, lambda layer: not rotated[layer])
    config = llama.own_config(hf, "SmolLM3", defaults=_SMOLLM3, windows=windows_of(kinds, window))
    return config | {"unrotated_layers": [not turned for turned in rotated]}


# StableLM 2 and 3B: layer norms, a part of each head rotated, in some models attention beside the MLP.

_STABLELM = {"partial_rotary_factor": 0.25, "max_position_embeddings": 4096}


def stablelm_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, and whether attention stands beside the MLP and each head has a norm of its own."""
    plain = {**hf, "attention_bias": hf.get("use_qkv_bias", False), "mlp_bias": False, "head_dim": None}
    return llama.own_config(plain, "StableLM", defaults=_STABLELM, partial=True) | {
        "norm_epsilon": hf.get("layer_norm_eps", 1e-5),
        "use_parallel_residual": bool(hf.get("use_parallel_residual", False)),
        "qk_layernorm": bool(hf.get("qk_layernorm", False)),
    }


def stablelm_names(config: CheckpointConfig) -> SourceNames:
    parallel, normed = config.own("use_parallel_residual", False), config.own("qk_layernorm", False)
    norms = {"input_layernorm": "input_layernorm"} if parallel else llama.NAMES.norms
    parts = {"attention.q_layernorm": "self_attn.q_layernorm", "attention.k_layernorm": "self_attn.k_layernorm"}
    return replace(
        llama.NAMES,
        norms=norms,
        norm_biases=True,
        head_norms={ours: f"{theirs}.norms.{{}}" for ours, theirs in parts.items()} if normed else {},
        head_norm_weights="row",
        biases=frozenset({"qkv"} if config.own("attn_bias", False) else ()),
    )


def stablelm_decoder(config: CheckpointConfig) -> Decoder:
    parallel = config.own("use_parallel_residual", False)
    return replace(
        llama.decoder(config),
        norm="layer",
        block="parallel" if parallel else "sequential",
        mlp_norm=None if parallel else "post_layernorm",
        qk_norm="heads" if config.own("qk_layernorm", False) else None,
    )

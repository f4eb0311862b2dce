"""StableLM 2 and 3B: layer norms, a part of each head rotated, in some models attention beside the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames

_DEFAULTS = {"partial_rotary_factor": 0.25, "max_position_embeddings": 4096}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, and whether attention stands beside the MLP and each head has a norm of its own."""
    plain = {**hf, "attention_bias": hf.get("use_qkv_bias", False), "mlp_bias": False, "head_dim": None}
    return llama.own_config(plain, "StableLM", defaults=_DEFAULTS, partial=True) | {
        "norm_epsilon": hf.get("layer_norm_eps", 1e-5),
        "use_parallel_residual": bool(hf.get("use_parallel_residual", False)),
        "qk_layernorm": bool(hf.get("qk_layernorm", False)),
    }


def names(config: CheckpointConfig) -> SourceNames:
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


def decoder(config: CheckpointConfig) -> Decoder:
    parallel = config.own("use_parallel_residual", False)
    return replace(
        llama.decoder(config),
        norm="layer",
        block="parallel" if parallel else "sequential",
        mlp_norm=None if parallel else "post_layernorm",
        qk_norm="heads" if config.own("qk_layernorm", False) else None,
    )

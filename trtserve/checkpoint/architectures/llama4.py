"""Llama 4 (text): attention in chunks with normed, rotated heads; whole layers without positions; sigmoid routers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    Decoder,
    ExpertNames,
    HfConfig,
    QueryGrowth,
    SourceNames,
    WrongConfigError,
    is_number,
    moe_object,
    require_sizes,
    required,
)
from trtserve.checkpoint.architectures.parts.expert_tensors import (
    NOT_NORMALIZED,
    expert_counts,
    experts_of,
    halves_apart,
)
from trtserve.checkpoint.architectures.parts.positions import layer_flags, layer_kinds

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 131072, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192, "use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 8192,
    "attn_scale": 0.1,
}  # fmt: skip
_EXPERTS = ExpertNames(
    router="feed_forward.router",
    gate=None,
    up="feed_forward.experts.{}.gate_up_proj",
    down="feed_forward.experts.{}.down_proj",
    shared="feed_forward.shared_expert",
    transposed=True,
    gate_first=True,
)


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the chunks, how queries of layers without positions grow, and the experts."""
    hf = {**_DEFAULTS, **hf}
    every = required(hf, "num_hidden_layers", "no_rope_layer_interval")["no_rope_layer_interval"]
    chunk = hf["attention_chunk_size"]
    rotated = layer_flags({**hf, "no_rope_layers": hf.get("no_rope_layers") or None}, "no_rope_layers") or [
        bool((layer + 1) % every) for layer in range(hf["num_hidden_layers"])
    ]
    kinds = layer_kinds(hf, ("chunked_attention", "full_attention")) or [
        "chunked_attention" if turned else "full_attention" for turned in rotated
    ]
    windows = [chunk if kind == "chunked_attention" else None for kind in kinds]
    grown = {}
    if hf["attn_temperature_tuning"]:
        if not is_number(hf["attn_scale"]):
            raise WrongConfigError(
                f"config.json has attn_scale = {hf['attn_scale']!r:.80}; expected a positive number."
            )
        grown = {"attn_scale": float(hf["attn_scale"]), "floor_scale": required(hf, "floor_scale")["floor_scale"]}
    inner = required(hf, "intermediate_size", "intermediate_size_mlp")
    return {
        **llama.own_config(
            {**hf, "layer_types": None, "mlp_bias": False, "intermediate_size": inner["intermediate_size_mlp"]},
            "Llama 4",
            defaults={},
            windows=windows,
        ),
        **_experts(hf, inner["intermediate_size"]),
        **grown,
        **halves_apart(hf),
        "attention_chunks": True,
        "use_qk_norm": bool(hf["use_qk_norm"]),
        "unrotated_layers": [not turned for turned in rotated],
    }


def _experts(hf: HfConfig, inner: int) -> dict[str, Any]:
    """Return the keys of experts of `inner` units, and of a shared one, in the layers `moe_layers`."""
    experts, chosen = expert_counts(hf, "num_local_experts")
    layers = range(hf["num_hidden_layers"])
    require_sizes(hf, "interleave_moe_layer_step")
    step = hf["interleave_moe_layer_step"]
    sparse = list(layers[step - 1 :: step]) if hf.get("moe_layers") is None else hf["moe_layers"]
    if not isinstance(sparse, list) or any(type(layer) is not int for layer in sparse):
        raise WrongConfigError(
            f"config.json has moe_layers = {sparse!r:.80}; expected a list of the layers with experts."
        )
    return {
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=NOT_NORMALIZED, shared_size=inner),
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": inner,
        "shared_expert_gate": False,
        "scoring_func": "sigmoid",
        "experts_scale_inputs": True,
        "dense_layers": [layer for layer in layers if layer not in sparse],
    }


def names(config: CheckpointConfig) -> SourceNames:
    apart = replace(
        _EXPERTS,
        gate="feed_forward.experts.{}.gate_proj",
        up="feed_forward.experts.{}.up_proj",
        transposed=False,
        gate_first=False,
    )
    return replace(
        llama.names(config),
        fc="feed_forward.gate_proj",
        gate="feed_forward.up_proj",
        proj="feed_forward.down_proj",
        experts=apart if config.own("halves_apart", False) else _EXPERTS,
    )


def decoder(config: CheckpointConfig) -> Decoder:
    beta, every = config.own_or_none("attn_scale", float), config.own("floor_scale", 0)
    return replace(
        llama.decoder(config),
        mlp="experts",
        experts=experts_of(config),
        chunked=True,
        rope_interleaved=True,
        qk_norm="bare" if config.own("use_qk_norm", True) else None,
        query_growth=None if beta is None else QueryGrowth(beta=beta, every=every, first=1, unrotated=True),
    )

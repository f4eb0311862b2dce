"""Gemma 4 (text model): heads of another size in layers without a window, shared keys, and an input to each layer.

Queries, keys and values are normed, the last layers may use the keys and values of earlier ones, and every layer ends
with a factor. Experts may stand beside the MLP. The halves for images and sound are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import gemma, gemma2
from trtserve.checkpoint.architectures.base import (
    Decoder,
    ExpertNames,
    HfConfig,
    SourceNames,
    WrongConfigError,
    required,
    superset,
)
from trtserve.checkpoint.architectures.gemma import gemma_config
from trtserve.checkpoint.architectures.parts.expert_tensors import expert_counts, experts_of, softmax_experts
from trtserve.checkpoint.architectures.parts.layer_sizes import full_heads, shared_keys
from trtserve.checkpoint.architectures.parts.positions import (
    attention_kinds,
    inverse_frequencies,
    rope_parameters,
    scaling_type,
    window_keys,
    windows_of,
)
from trtserve.checkpoint.architectures.qwen3 import HEAD_NORMS
from trtserve.errors import UnsupportedModelError

# Defaults of transformers' Gemma4TextConfig; the published `text_config` omits default values.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "global_head_dim": 512,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
}
_EXPERTS = ExpertNames(
    router="router.proj",
    gate=None,
    up="experts.{}.gate_up_proj",
    down="experts.{}.down_proj",
    shared="mlp",
    router_norm="router.scale",
    scale="router.per_expert_scale",
    gate_first=True,
)
_EXPERT_NORMS = {
    "mlp.pre_experts_layernorm": "pre_feedforward_layernorm_2",
    "mlp.post_experts_layernorm": "post_feedforward_layernorm_2",
    "mlp.post_shared_layernorm": "post_feedforward_layernorm_1",
}
_BASES = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}
_PATTERN = 6
_PART = 0.25


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: GemmaConfig's keys, and ours of what it lacks."""
    rope = hf.get("rope_parameters")
    hf = {**_DEFAULTS, **{key: value for key, value in hf.items() if value is not None}}
    kinds = attention_kinds(hf, lambda layer: (layer + 1) % _PATTERN)
    kinds[-1] = "full_attention"  # as in transformers
    base, part = _rotation(rope, "full_attention", "proportional")
    local_base, _ = _rotation(rope, "sliding_attention", "default")
    # The nested rotation is read above; images may see each other, text sees only what came before.
    seen = None if hf.get("use_bidirectional_attention") == "vision" else hf.get("use_bidirectional_attention")
    config = gemma_config(
        {**hf, "rope_parameters": None, "use_bidirectional_attention": seen},
        activation=hf.get("hidden_activation", "gelu_pytorch_tanh"),
        kv_heads=4,
        longest=131072,
    )
    return {
        **config,
        "use_parallel_embedding": False,
        "rotary_base": base,
        "rotary_pct": part,
        "rope_local_base_freq": local_base,
        "final_logit_softcapping": hf.get("final_logit_softcapping"),
        **full_heads(hf, kinds),
        "keys_are_values": bool(hf.get("attention_k_eq_v")),
        **shared_keys(hf, kinds),
        **_layer_inputs(hf),
        **(_experts(hf) if hf.get("enable_moe_block") else {}),
        **window_keys(windows_of(kinds, hf["sliding_window"])),
        **superset("the family Gemma 4"),
    }


def _rotation(nested: object, kind: str, expected: str) -> tuple[float, float]:
    """Return the base of a kind of layer, and which part of its pairs rotate."""
    found = nested.get(kind) if isinstance(nested, Mapping) else None
    parameters = rope_parameters({"rope_parameters": found})
    scaling = scaling_type(parameters) if found is not None else expected
    if scaling != expected or parameters.get("factor", 1.0) != 1.0:
        raise WrongConfigError(
            f"config.json has rotary scaling {scaling!r} for {kind} of this Gemma 4; expected {expected!r} without a "
            "factor."
        )
    default = _PART if found is None and kind == "full_attention" else 1.0
    part = float(parameters.get("partial_rotary_factor") or default)
    if part > 1 or (part != 1 and expected == "default"):
        raise UnsupportedModelError(f"config.json has partial_rotary_factor = {part:g} for {kind}.")
    return float(parameters.get("rope_theta") or _BASES[kind]), part


def _layer_inputs(hf: HfConfig) -> dict[str, Any]:
    size = hf["hidden_size_per_layer_input"]
    if size and hf["vocab_size_per_layer_input"] != hf["vocab_size"]:
        raise UnsupportedModelError(
            f"config.json has vocab_size_per_layer_input = {hf['vocab_size_per_layer_input']} and vocab_size = "
            f"{hf['vocab_size']}; expected equal numbers."
        )
    return {"layer_input_size": size}


def _experts(hf: HfConfig) -> dict[str, Any]:
    """Return the keys of experts; the MLP beside them is a shared one."""
    counts = expert_counts({**hf, "num_experts_per_tok": hf.get("top_k_experts")}, "num_experts")
    shared, keys = required(hf, "intermediate_size")["intermediate_size"], softmax_experts(hf, counts, 1, shared=0)
    keys["moe"]["shared_expert_intermediate_size"] = shared
    return {**keys, "moe_shared_expert_intermediate_size": shared, "experts_apart": True}


def names(config: CheckpointConfig) -> SourceNames:
    plain, experts = gemma2.names(config), _EXPERTS if config.moe.num_experts else None
    inputs = {"post_inputs_layernorm": "post_per_layer_input_norm"} if config.layer_input_size else {}
    return replace(
        plain,
        norms={**plain.norms, **inputs, **(_EXPERT_NORMS if experts else {})},
        experts=experts,
        norm_offset=0.0,
        head_norms=HEAD_NORMS,
        layer_scale="layer_scalar",
        values_are_keys=config.own("keys_are_values", False),
        unused=(*plain.unused, *_absent(config)),
    )


def _absent(config: CheckpointConfig) -> list[str]:
    """Return the keys and values of layers that use others' and of those whose keys are values: files may have them."""
    return [
        f"model.layers.{layer}.self_attn.{part}.weight"
        for layer in range(config.num_hidden_layers)
        if config.key_layer(layer) != layer
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]


def decoder(config: CheckpointConfig) -> Decoder:
    rotated = int(config.own("rotary_pct", 1.0) * config.full_head_size // 2)
    whole = inverse_frequencies(config.full_head_size, config.rotary_base, None)
    experts = experts_of(config) if config.moe.num_experts else None
    return replace(
        gemma.decoder(config),
        mlp="experts" if experts else "gated",
        experts=experts,
        block="sandwich",
        qk_norm="heads",
        value_norm=True,
        attention_scale=1.0,
        # Pairs that do not rotate have frequency 0: they are the last of all pairs of a head.
        rope_inv_freq=(*whole[:rotated], *[0.0] * (len(whole) - rotated)),
        local_rope_inv_freq=inverse_frequencies(
            config.head_size, config.own("rope_local_base_freq", _BASES["sliding_attention"]), None
        ),
        windows=config.max_attention_window,
        key_layers=tuple(config.key_layer(layer) for layer in range(config.num_hidden_layers)),
        layer_inputs=config.layer_input_size,
        layer_scales=True,
        logits_softcap=config.own_or_none("final_logit_softcapping", float),
    )

"""Qwen3-Next, Qwen3.5 and Qwen3.6: three of four layers have a gated delta rule, the others attention with gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama, qwen3
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    SourceNames,
    WrongConfigError,
    moe_object,
    require_activation,
    required,
    superset,
)
from trtserve.checkpoint.architectures.parts.expert_tensors import NOT_NORMALIZED, RENORMALIZED, expert_counts
from trtserve.checkpoint.architectures.parts.mixer_layers import mixer_keys
from trtserve.checkpoint.architectures.parts.mixers import DeltaNet, MixerTensor
from trtserve.checkpoint.architectures.qwen2_moe import EXPERTS, dense_layers
from trtserve.errors import UnsupportedModelError

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_LINEAR = tuple(key for key in _DEFAULTS if key.startswith("linear_"))


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the sizes of the layers with a delta rule, and the experts."""
    next_, experts = hf.get("model_type") == "qwen3_next", "num_experts_per_tok" in hf
    hf = {**_DEFAULTS, "num_key_value_heads": 2 if next_ or experts else 4, **hf}
    if experts:
        hf.setdefault("intermediate_size", hf.get("moe_intermediate_size"))
    if hf.get("attention_bias"):
        raise UnsupportedModelError("config.json has attention_bias = true; no published model of this family has it.")
    require_activation(hf.get("hidden_act", "silu"), "silu")  # also of the convolution
    sizes = required(hf, *_LINEAR, "full_attention_interval")
    if hf["linear_num_value_heads"] % hf["linear_num_key_heads"]:
        raise WrongConfigError(
            f"config.json has {hf['linear_num_value_heads']} value heads and {hf['linear_num_key_heads']} key heads of "
            "linear attention; expected a multiple."
        )
    every = sizes.pop("full_attention_interval")
    default = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(_layers(hf))]
    plain = llama.own_config(hf, "Qwen3-Next" if next_ else "Qwen3.5", defaults={}, partial=True, windows=())
    moe = _experts(hf, plain, listed=next_) if experts else {}
    return {**plain, **mixer_keys(hf, "linear_attention", default=default), **sizes, "fused_inputs": next_, **moe}


def _layers(hf: HfConfig) -> int:
    return int(required(hf, "num_hidden_layers")["num_hidden_layers"])


def _experts(hf: HfConfig, plain: dict[str, Any], *, listed: bool) -> dict[str, Any]:
    """Return the keys of experts; Qwen3.5 always scales the chosen ones, and has experts in every layer."""
    experts, chosen = expert_counts(hf, "num_experts")
    inner = required(hf, "moe_intermediate_size", "shared_expert_intermediate_size")
    shared = inner["shared_expert_intermediate_size"]
    mode = RENORMALIZED if not listed or hf.get("norm_topk_prob", True) else NOT_NORMALIZED
    return {
        "hidden_act": "swiglu",
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=mode, shared_size=shared),
        "moe_intermediate_size": inner["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared,
        "dense_layers": dense_layers(hf) if listed else [],
        **superset(*plain["superset"]),
    }


def _delta_net(config: CheckpointConfig) -> DeltaNet:
    taps, key, value, key_heads, value_heads = (config.own(name, int(_DEFAULTS[name])) for name in _LINEAR)
    return DeltaNet(key_heads=key_heads, value_heads=value_heads, key=key, value=value, taps=taps)


def names(config: CheckpointConfig) -> SourceNames:
    fused = config.own("fused_inputs", False)
    return replace(
        llama.NAMES,
        head_norms=qwen3.HEAD_NORMS,
        norm_offset=1.0,
        gated_queries=True,
        mixer=_tensors(_delta_net(config), config.hidden_size, fused=fused),
        experts=replace(EXPERTS, shared="mlp.shared_expert") if config.moe.num_experts else None,
        unused=(*llama.NAMES.unused, "mtp.*"),
    )


def _tensors(net: DeltaNet, hidden: int, *, fused: bool) -> list[MixerTensor]:
    """Return the tensors; `fused` ones have the rows of a key head side by side: query, key, values, gates."""
    inputs = ["in_proj_qkvz"] if fused else ["in_proj_qkv", "in_proj_z"]
    gates = ["in_proj_ba"] if fused else ["in_proj_b", "in_proj_a"]
    each = net.value_heads // net.key_heads
    own = net.key, net.key, each * net.value, each * net.value
    return [
        MixerTensor(
            name="in_proj.weight",
            sources=tuple(f"linear_attn.{name}.weight" for name in inputs),
            shape=(net.channels + net.values, hidden),
            parts=() if fused else (net.channels, net.values),
            order=_ungrouped(net.key_heads, own) if fused else (),
        ),
        MixerTensor(
            name="gates.weight",
            sources=tuple(f"linear_attn.{name}.weight" for name in gates),
            shape=(2 * net.value_heads, hidden),
            parts=() if fused else (net.value_heads, net.value_heads),
            order=_ungrouped(net.key_heads, (each, each)) if fused else (),
        ),
        MixerTensor(name="conv.weight", sources=("linear_attn.conv1d.weight",), shape=(net.channels, net.taps)),
        MixerTensor(name="decay", sources=("linear_attn.A_log",), shape=(net.value_heads,), wide=True),
        MixerTensor(name="time_bias", sources=("linear_attn.dt_bias",), shape=(net.value_heads,), wide=True),
        MixerTensor(name="norm.weight", sources=("linear_attn.norm.weight",), shape=(net.value,)),
        MixerTensor(name="out_proj.weight", sources=("linear_attn.out_proj.weight",), shape=(hidden, net.values)),
    ]


def _ungrouped(groups: int, parts: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the runs of the first part of all groups, then of the second, and so on."""
    starts = [sum(parts[:number]) for number in range(len(parts))]
    return tuple(
        (group * sum(parts) + start, rows) for start, rows in zip(starts, parts, strict=True) for group in range(groups)
    )


def decoder(config: CheckpointConfig) -> Decoder:
    described = llama.expert_decoder(config) if config.moe.num_experts else llama.decoder(config)
    return replace(
        described,
        qk_norm="heads",
        attention_gate=True,
        mixer=_delta_net(config),
        mixer_layers=frozenset(config.mixer_layers),
    )

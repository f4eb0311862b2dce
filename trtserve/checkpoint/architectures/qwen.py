"""Qwen2 to Qwen3.5, dense and with experts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import (
    Decoder,
    ExpertNames,
    HfConfig,
    SourceNames,
    WrongConfigError,
    moe_object,
    require_activation,
    require_sizes,
    required,
    superset,
)
from trtserve.checkpoint.architectures.parts.expert_tensors import NOT_NORMALIZED, RENORMALIZED, expert_counts
from trtserve.checkpoint.architectures.parts.mixers import DeltaNet, MixerTensor
from trtserve.checkpoint.architectures.parts.positions import attention_kinds, window_keys, windows_of
from trtserve.checkpoint.architectures.parts.state_space import mixer_keys
from trtserve.errors import UnsupportedModelError

# Qwen2 and Qwen2.5: Llama with query, key and value biases, and optional windows from some layer on.

# QWenConfig's keys that are equal for all dense models.
_CONSTANTS: dict[str, Any] = {
    "mlp_bias": False,
    "disable_weight_only_quant_plugin": False,
    "num_labels": 1,
    "use_logn_attn": False,
    "seq_length": 8192,
    "moe": moe_object(normalization_mode=0),
    "moe_intermediate_size": 0,
    "moe_shared_expert_intermediate_size": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def qwen2_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: keys of TensorRT-LLM 1.2's QWenConfig and the windows."""
    return qwen_config(hf, qwen_type="qwen2", attn_bias=True)


def qwen_config(
    hf: HfConfig, *, qwen_type: str, attn_bias: bool, windows: Sequence[int | None] | None = None
) -> dict[str, Any]:
    """Return the config of any dense Qwen; absent keys get the defaults of transformers' Qwen2Config.

    `windows` replaces the layers' windows in families with a rule of their own.
    """
    return {
        **llama.common_config(hf, longest=32768),
        "attn_bias": attn_bias,
        "qwen_type": qwen_type,
        **_CONSTANTS,
        **window_keys(_windows(hf, operator.ge) if windows is None else windows),
    }


def _windows(hf: HfConfig, slides: Callable[[int, int], object]) -> list[int | None]:
    """Return the layers' windows: where `slides(layer, max_window_layers)`, unless `layer_types` overrides it."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    border = hf.get("max_window_layers", 28)
    return windows_of(attention_kinds(hf, lambda layer: slides(layer, border)), window)


qwen2_names = replace(llama.NAMES, biases=frozenset({"qkv"}))


# Qwen2-MoE (also Qwen1.5-MoE): Qwen2 with experts instead of the MLP, plus a shared expert.

QWEN_EXPERTS = ExpertNames(
    router="mlp.gate", gate="mlp.experts.{}.gate_proj", up="mlp.experts.{}.up_proj", down="mlp.experts.{}.down_proj"
)
qwen2_moe_decoder = llama.expert_decoder


def qwen2_moe_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: keys of TensorRT-LLM 1.2's QWenConfig and the windows."""
    shared = required(hf, "shared_expert_intermediate_size")["shared_expert_intermediate_size"]
    return qwen_moe_config(
        hf,
        qwen_type="qwen2_moe",
        attn_bias=bool(hf.get("qkv_bias", True)),
        shared_size=shared,
        windows=_windows(hf, lambda layer, border: layer % 2 == 0 and layer < border),
    )


def qwen_moe_config(
    hf: HfConfig, *, qwen_type: str, attn_bias: bool, shared_size: int, windows: Sequence[int | None]
) -> dict[str, Any]:
    """Return the config of a Qwen with experts; `shared_size` is the shared expert's width, 0 without one.

    `normalization_mode` follows the model's `norm_topk_prob`. Upstream always writes 0, which makes the experts of a
    normalising Qwen3-MoE too weak (decision 0009).
    """
    dense = dense_layers(hf)
    require_activation(hf.get("hidden_act", "silu"), "silu")
    experts, chosen = expert_counts(hf, "num_experts")
    mode = RENORMALIZED if hf.get("norm_topk_prob") else NOT_NORMALIZED
    common = qwen_config(hf, qwen_type=qwen_type, attn_bias=attn_bias, windows=windows)
    return {
        **common,
        "hidden_act": "swiglu",
        "moe": moe_object(num_experts=experts, top_k=chosen, normalization_mode=mode, shared_size=shared_size),
        "moe_intermediate_size": required(hf, "moe_intermediate_size")["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared_size,
        **({"dense_layers": dense} if dense else {}),
        **superset(*common.get("superset", ()), *["layers without experts"] * bool(dense)),
    }


def dense_layers(hf: HfConfig) -> list[int]:
    """Return the layers that have no experts."""
    given, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
    require_sizes({"decoder_sparse_step": step}, "decoder_sparse_step")
    if not isinstance(given, list):
        raise UnsupportedModelError(f"config.json has mlp_only_layers = {given!r}; expected a list of layers.")
    return [layer for layer in range(hf["num_hidden_layers"]) if layer in given or (layer + 1) % step]


def qwen2_moe_names(config: CheckpointConfig) -> SourceNames:
    return replace(
        llama.NAMES,
        biases=frozenset({"qkv"} if config.own("attn_bias", True) else ()),
        experts=replace(QWEN_EXPERTS, shared="mlp.shared_expert"),
    )


# Qwen3: Llama with queries and keys normalised per head.

_HEAD_SIZE = 128  # transformers' default, independent of the hidden size


def qwen3_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's QWenConfig and the windows.

    `qk_layernorm` stays false, as upstream writes it: `qwen_type` enables the norms.
    """
    head_size, biased = hf.get("head_dim") or _HEAD_SIZE, bool(hf.get("attention_bias"))
    config = qwen_config({**hf, "head_dim": head_size}, qwen_type="qwen3", attn_bias=biased)
    return with_biases(config, biased=biased)


def with_biases(config: Mapping[str, Any], *, biased: bool) -> dict[str, Any]:
    """Return the config with the mark of attention with biases, which only our runtimes have."""
    words = [*config.get("superset", ()), *["biases of a Qwen 3's attention"] * biased]
    return {**config, **superset(*words)}


def qwen3_names(config: CheckpointConfig) -> SourceNames:
    return replace(llama.names(config), head_norms=llama.HEAD_NORMS)


qwen3_decoder = llama.decoder_with(qk_norm="heads")


# Qwen3-MoE: Qwen3 with experts instead of the MLP.


def qwen3_moe_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: keys of TensorRT-LLM 1.2's QWenConfig and the window."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    biased = bool(hf.get("attention_bias"))
    config = qwen_moe_config(hf, qwen_type="qwen3_moe", attn_bias=biased, shared_size=0, windows=[window])
    return with_biases(config, biased=biased)


def qwen3_moe_names(config: CheckpointConfig) -> SourceNames:
    return replace(qwen3_names(config), experts=QWEN_EXPERTS)


qwen3_moe_decoder = llama.decoder_with(experts=True, qk_norm="heads")


# Qwen3-Next, Qwen3.5 and Qwen3.6: three of four layers have a gated delta rule, the others attention with gates.

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
}  # fmt: skip
_LINEAR = tuple(key for key in _DEFAULTS if key.startswith("linear_"))


def qwen3_next_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
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


def qwen3_next_names(config: CheckpointConfig) -> SourceNames:
    fused = config.own("fused_inputs", False)
    return replace(
        llama.NAMES,
        head_norms=llama.HEAD_NORMS,
        norm_offset=1.0,
        gated_queries=True,
        mixer=_tensors(_delta_net(config), config.hidden_size, fused=fused),
        experts=replace(QWEN_EXPERTS, shared="mlp.shared_expert") if config.moe.num_experts else None,
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


def qwen3_next_decoder(config: CheckpointConfig) -> Decoder:
    described = llama.expert_decoder(config) if config.moe.num_experts else llama.decoder(config)
    return replace(
        described,
        qk_norm="heads",
        attention_gate=True,
        mixer=_delta_net(config),
        mixer_layers=frozenset(config.mixer_layers),
    )

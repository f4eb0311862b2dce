"""LFM2, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import llama
from trtserve.checkpoint.architectures.base import Decoder, ExpertNames, HfConfig, SourceNames, required, superset
from trtserve.checkpoint.architectures.parts.expert_tensors import deepseek_experts, experts_of
from trtserve.checkpoint.architectures.parts.mixers import MixerTensor, ShortConvolution
from trtserve.checkpoint.architectures.parts.state_space import mixer_keys

# LFM2: most layers have a short convolution instead of attention.

# transformers' defaults for absent keys.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 8, "norm_eps": 1e-5, "max_position_embeddings": 128_000, "rope_theta": 1e6,
    "conv_bias": False, "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}  # fmt: skip


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return Llama's config, the layers with convolutions, and the MLP's width, which transformers calculates."""
    tied = hf.get("tie_embedding", hf.get("tie_word_embeddings", True))
    hf = {**_DEFAULTS, **hf, "tie_word_embeddings": tied, "attention_bias": False}
    hf["intermediate_size"] = hf.get("block_ff_dim", hf.get("intermediate_size"))
    required(hf, "num_hidden_layers", "conv_L_cache", "block_multiple_of", "intermediate_size")
    if hf["block_auto_adjust_ff_dim"]:
        inner = int(2 * hf["intermediate_size"] / 3)
        if (factor := hf["block_ffn_dim_multiplier"]) is not None:
            multiple = hf["block_multiple_of"]
            inner = multiple * -(-int(factor * inner) // multiple)
        hf["intermediate_size"] = inner
    attending = hf.get("full_attn_idxs")
    layers = range(hf["num_hidden_layers"])
    default = None if attending is None else ["full_attention" if n in attending else "conv" for n in layers]
    hf["rms_norm_eps"] = hf["norm_eps"]
    return {
        **llama.own_config(hf, "LFM2", defaults={}, windows=()),
        **mixer_keys(hf, "conv", default=default),
        "conv_bias": bool(hf["conv_bias"]),
        "conv_L_cache": hf["conv_L_cache"],
    }


def names(config: CheckpointConfig) -> SourceNames:
    hidden, shapes = config.hidden_size, {"in_proj": 3, "out_proj": 1}
    tensors = [
        MixerTensor(name=f"{name}.weight", sources=(f"conv.{name}.weight",), shape=(count * hidden, hidden))
        for name, count in shapes.items()
    ]
    conv = config.own("conv_L_cache", 3)
    tensors.append(MixerTensor(name="conv.weight", sources=("conv.conv.weight",), shape=(hidden, conv)))
    if config.own("conv_bias", False):
        tensors += [
            MixerTensor(name=f"{name}.bias", sources=(f"conv.{name}.bias",), shape=(count * hidden,))
            for name, count in {**shapes, "conv": 1}.items()
        ]
    return replace(
        llama.NAMES,
        norms={"input_layernorm": "operator_norm", "post_layernorm": "ffn_norm"},
        head_norms={"attention.q_layernorm": "self_attn.q_layernorm", "attention.k_layernorm": "self_attn.k_layernorm"},
        dense="self_attn.out_proj",
        fc="feed_forward.w1",
        gate="feed_forward.w3",
        proj="feed_forward.w2",
        final_norm="model.embedding_norm",
        mixer=tensors,
    )


def decoder(config: CheckpointConfig) -> Decoder:
    mixer = ShortConvolution(width=config.hidden_size, taps=config.own("conv_L_cache", 3))
    return replace(llama.decoder(config), qk_norm="heads", mixer=mixer, mixer_layers=frozenset(config.mixer_layers))


# LFM2 with experts: sigmoid routers with a correction, and an MLP in the first layers.

_EXPERTS = ExpertNames(
    router="feed_forward.gate",
    gate="feed_forward.experts.{}.w1",
    up="feed_forward.experts.{}.w3",
    down="feed_forward.experts.{}.w2",
)
# transformers' defaults for absent keys.
_LFM2_MOE: dict[str, Any] = {
    "num_dense_layers": 2, "use_expert_bias": True, "num_experts_per_tok": 4, "num_experts": 32,
    "moe_intermediate_size": 1792, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
}  # fmt: skip


def lfm2_moe_checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return LFM2's config, whose MLPs have their width as it is, and the experts."""
    hf = {**_LFM2_MOE, **hf, "block_auto_adjust_ff_dim": False}
    as_deepseek = {
        "n_routed_experts": hf["num_experts"],
        "first_k_dense_replace": hf["num_dense_layers"],
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 0,
    }
    plain = checkpoint_config(hf)
    return {
        **plain,
        **deepseek_experts({**hf, **as_deepseek}),
        "hidden_act": "swiglu",
        "use_expert_bias": bool(hf["use_expert_bias"]),
        **superset(*plain["superset"], "sigmoid routers"),
    }


def lfm2_moe_names(config: CheckpointConfig) -> SourceNames:
    correction = "feed_forward.expert_bias" if config.own("use_expert_bias", True) else None
    return replace(names(config), experts=replace(_EXPERTS, correction=correction))


def lfm2_moe_decoder(config: CheckpointConfig) -> Decoder:
    return replace(decoder(replace(config, hidden_act="silu")), mlp="experts", experts=experts_of(config))

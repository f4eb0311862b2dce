"""StarCoder2: layer norms, rotary positions, grouped-query attention, plain MLP; TensorRT-LLM treats it as a GPT."""

from __future__ import annotations

import math
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import (
    Decoder,
    HfConfig,
    SourceNames,
    decoder_sizes,
    moe_object,
    require_activation,
)
from trtserve.checkpoint.architectures.parts.positions import (
    attention_windows,
    inverse_frequencies,
    own_rotary,
    rotary_scale,
    uniform_window,
)

# GPTConfig's keys that are equal for all models of this family.
_CONSTANTS: dict[str, Any] = {
    "gpt_variant": "starcoder2",
    "q_scaling": 1,
    "embedding_scale": None,
    "apply_query_key_layer_scaling": False,
    "rotary_pct": 1.0,
    "rotary_scaling": None,
    "inner_layernorm": False,
    "norm_before_bmm1": False,
    "moe": moe_object(normalization_mode=1),
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GPTConfig and the window.

    `gelu`, which upstream writes for every StarCoder2, means the tanh approximation.
    """
    sizes = decoder_sizes(hf, intermediate_size="intermediate_size")
    require_activation(hf.get("hidden_act", "gelu_pytorch_tanh"), "gelu_tanh")
    longest, (base, scaling) = hf.get("max_position_embeddings", 4096), own_rotary(hf)
    return {
        **sizes,
        "num_key_value_heads": hf.get("num_key_value_heads") or sizes["num_attention_heads"],
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("norm_epsilon", 1e-5),
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": longest,
        "bias": bool(hf.get("use_bias", True)),
        "rotary_base": base,
        **_CONSTANTS,
        **uniform_window(hf, hf.get("sliding_window")),
        **scaling,
    }


def names(config: CheckpointConfig) -> SourceNames:
    return SourceNames(
        embedding="model.embed_tokens",
        layer="model.layers.{}.",
        norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        dense="self_attn.o_proj",
        fc="mlp.c_fc",
        proj="mlp.c_proj",
        final_norm="model.norm",
        biases=frozenset(("qkv", "dense", "fc", "proj") if config.own("bias", True) else ()),
        unused=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return Decoder(
        norm="layer",
        positions="rope",
        mlp="plain",
        activation="gelu_tanh",
        attention_scale=1 / (config.own("q_scaling", 1.0) * math.sqrt(config.head_size)),
        rope_inv_freq=inverse_frequencies(config.head_size, config.rotary_base, config.rotary_scaling),
        rope_scale=rotary_scale(config.rotary_scaling),
        windows=attention_windows(config),
    )

"""GPT-2: layer norms, learned positions, Conv1D weights stored [in, out], plain MLP."""

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
from trtserve.errors import UnsupportedModelError

# GPTConfig's keys that are equal for all models of this family.
_CONSTANTS: dict[str, Any] = {
    "gpt_variant": "gpt2",
    "bias": True,
    "embedding_scale": None,
    "apply_query_key_layer_scaling": False,
    "rotary_pct": 1.0,
    "rotary_base": 10000.0,
    "rotary_scaling": None,
    "inner_layernorm": False,
    "norm_before_bmm1": False,
    "moe": moe_object(normalization_mode=1),
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GPTConfig.

    GPTConfig has no key for tied embeddings: upstream uses the embedding as head for every GPT-2, we use the model's
    own head when it has one.
    """
    sizes = decoder_sizes(
        hf,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if hf.get(key):
            raise UnsupportedModelError(f"This GPT-2 sets {key}, which a TensorRT-LLM checkpoint cannot express.")
    activation = hf.get("activation_function", "gelu_new")
    require_activation(activation)
    return {
        **sizes,
        "intermediate_size": hf.get("n_inner") or 4 * sizes["hidden_size"],
        "hidden_act": activation,
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "learned_absolute",
        # TensorRT-LLM multiplies q·k by 1 / (q_scaling · √head_size).
        "q_scaling": 1 if hf.get("scale_attn_weights", True) else 1 / math.sqrt(sizes["head_size"]),
        **_CONSTANTS,
    }


def names(config: CheckpointConfig) -> SourceNames:
    del config
    return SourceNames(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layer="transformer.h.{}.",
        norms={"input_layernorm": "ln_1", "post_layernorm": "ln_2"},
        qkv=("attn.c_attn",),
        dense="attn.c_proj",
        fc="mlp.c_fc",
        proj="mlp.c_proj",
        final_norm="transformer.ln_f",
        biases=frozenset(("qkv", "dense", "fc", "proj")),
        transposed=True,
        # Causal masks of old exports.
        unused=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return Decoder(
        norm="layer",
        positions="learned",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_scale=1 / (config.own("q_scaling", 1.0) * math.sqrt(config.head_size)),
    )

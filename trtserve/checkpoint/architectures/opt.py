"""OPT: layer norms before or after attention and MLP, learned positions, ReLU.

OPT-350m has embeddings narrower than its layers and projects them; the checkpoint stores the products.
"""

from __future__ import annotations

import math
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import (
    Decoder,
    Factor,
    HfConfig,
    SourceNames,
    decoder_sizes,
    require_activation,
)
from trtserve.errors import UnsupportedModelError


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's converter and loader."""
    sizes = decoder_sizes(hf, intermediate_size="ffn_dim")
    for key in ("enable_bias", "layer_norm_elementwise_affine"):
        if not hf.get(key, True):
            raise UnsupportedModelError(f"This OPT disables {key}, which a TensorRT-LLM checkpoint cannot express.")
    if hf.get("_remove_final_layer_norm"):
        raise UnsupportedModelError("This OPT has no final norm, which a TensorRT-LLM checkpoint cannot express.")
    require_activation(hf.get("activation_function", "relu"))
    return {
        **sizes,
        "hidden_act": hf.get("activation_function", "relu"),
        "norm_epsilon": 1e-5,
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "do_layer_norm_before": bool(hf.get("do_layer_norm_before", True)),
    }


def _norms_before(config: CheckpointConfig) -> bool:
    return config.own("do_layer_norm_before", False)


def _projections(config: CheckpointConfig) -> dict[str, Factor]:
    """Return the projections before the first layer and after the last one."""
    width = config.own("word_embed_proj_dim", config.hidden_size)
    if width == config.hidden_size:
        return {}
    return {
        "transformer.vocab_embedding.weight": Factor(
            name="model.decoder.project_in.weight", width=width, transposed=True
        ),
        "lm_head.weight": Factor(name="model.decoder.project_out.weight", width=width),
    }


def names(config: CheckpointConfig) -> SourceNames:
    return SourceNames(
        embedding="model.decoder.embed_tokens",
        layer="model.decoder.layers.{}.",
        norms={"input_layernorm": "self_attn_layer_norm", "post_layernorm": "final_layer_norm"},
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        dense="self_attn.out_proj",
        fc="fc1",
        proj="fc2",
        final_norm="model.decoder.final_layer_norm" if _norms_before(config) else None,
        biases=frozenset(("qkv", "dense", "fc", "proj")),
        positions="model.decoder.embed_positions",
        # Hugging Face numbers positions from 2, for padding that is never used.
        unused_positions=2,
        factors=_projections(config),
        # The version of fairseq's decoder.
        unused=("decoder.version", "model.decoder.version"),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return Decoder(
        norm="layer",
        positions="learned",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_scale=1 / math.sqrt(config.head_size),
        block="sequential" if _norms_before(config) else "post",
    )

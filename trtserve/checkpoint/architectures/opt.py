"""OPT: layer norms before or after attention and MLP, learned positions, ReLU.

OPT-350m has embeddings narrower than its layers and projects them; the checkpoint stores the products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import (
    Decoder,
    Factor,
    HfConfig,
    Target,
    require_activation,
    require_sizes,
    required,
)
from trtserve.checkpoint.architectures.parts.named_tensors import SourceNames, named_targets
from trtserve.errors import UnsupportedModelError

BASE_PREFIX = "model."
TIED = True

_NAMES = SourceNames(
    embedding="model.decoder.embed_tokens",
    layer="model.decoder.layers.{}.",
    norms={"input_layernorm": "self_attn_layer_norm", "post_layernorm": "final_layer_norm"},
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    dense="self_attn.out_proj",
    fc="fc1",
    proj="fc2",
    head="lm_head",
    final_norm="model.decoder.final_layer_norm",
    biases=frozenset(("qkv", "dense", "fc", "proj")),
    positions="model.decoder.embed_positions",
    # Hugging Face numbers positions from 2, for padding that is never used.
    unused_positions=2,
)

# The projections before the first layer and after the last one.
_PROJECTIONS = {
    "transformer.vocab_embedding.weight": Factor(name="model.decoder.project_in.weight", width=0, transposed=True),
    "lm_head.weight": Factor(name="model.decoder.project_out.weight", width=0),
}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's converter and loader."""
    sizes = required(hf, "hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "vocab_size")
    for key in ("enable_bias", "layer_norm_elementwise_affine"):
        if not hf.get(key, True):
            raise UnsupportedModelError(f"This OPT disables {key}, which a TensorRT-LLM checkpoint cannot express.")
    if hf.get("_remove_final_layer_norm"):
        raise UnsupportedModelError("This OPT has no final norm, which a TensorRT-LLM checkpoint cannot express.")
    if hf.get("word_embed_proj_dim") is not None:
        require_sizes(hf, "word_embed_proj_dim")
    require_activation(hf.get("activation_function", "relu"))
    return {
        "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": sizes["num_hidden_layers"],
        "num_attention_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes["num_attention_heads"],
        "intermediate_size": sizes["ffn_dim"],
        "vocab_size": sizes["vocab_size"],
        "head_size": sizes["hidden_size"] // sizes["num_attention_heads"],
        "hidden_act": hf.get("activation_function", "relu"),
        "norm_epsilon": 1e-5,
        "position_embedding_type": "learned_absolute",
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "rotary_embedding_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
        "do_layer_norm_before": bool(hf.get("do_layer_norm_before", True)),
    }


def targets(config: CheckpointConfig) -> list[Target]:
    """Return every tensor of the unsharded checkpoint, in file order."""
    names = _NAMES if _norms_before(config) else replace(_NAMES, final_norm=None)
    listed = named_targets(config, names, tied=config.own("tie_word_embeddings", TIED))
    width = config.own("word_embed_proj_dim", config.hidden_size)
    return listed if width == config.hidden_size else [_projected(target, width) for target in listed]


def _projected(target: Target, width: int) -> Target:
    factor = _PROJECTIONS.get(target.name)
    return target if factor is None else replace(target, factor=replace(factor, width=width))


def _norms_before(config: CheckpointConfig) -> bool:
    return config.own("do_layer_norm_before", False)


def unused(config: CheckpointConfig) -> Sequence[str]:
    """Return fairseq's decoder version, and the head when embeddings are tied."""
    patterns = ["decoder.version", "model.decoder.version"]
    return [*patterns, "lm_head.weight"] if config.own("tie_word_embeddings", TIED) else patterns


def decoder(config: CheckpointConfig) -> Decoder:
    """Describe the decoder from the checkpoint's config."""
    return Decoder(
        norm="layer",
        positions="learned",
        mlp="plain",
        activation=require_activation(config.hidden_act),
        attention_bias=True,
        dense_bias=True,
        mlp_bias=True,
        attention_scale=1 / math.sqrt(config.head_size),
        block="sequential" if _norms_before(config) else "post",
    )

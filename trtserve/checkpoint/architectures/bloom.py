"""BLOOM: ALiBi positions, normalised embeddings, layer norms, query, key and value fused per head."""

from __future__ import annotations

import math
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, decoder_sizes
from trtserve.checkpoint.architectures.parts.positions import alibi_slopes
from trtserve.errors import UnsupportedModelError

# Size keys in older configs.
_SPELLINGS = {"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's converter and loader.

    `gelu` means the tanh approximation here, as in every BLOOM. ALiBi has no maximum position.
    """
    spelled = dict(hf) | {name: hf[other] for name, other in _SPELLINGS.items() if hf.get(other) is not None}
    sizes = decoder_sizes(spelled)
    if hf.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedModelError(
            "This BLOOM sets apply_residual_connection_post_layernorm, which a TensorRT-LLM checkpoint cannot express."
        )
    return {
        **sizes,
        "intermediate_size": 4 * sizes["hidden_size"],
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "alibi",
        "max_position_embeddings": None,
    }


def names(config: CheckpointConfig) -> SourceNames:
    del config
    return SourceNames(
        embedding="transformer.word_embeddings",
        embedding_norm="transformer.word_embeddings_layernorm",
        layer="transformer.h.{}.",
        norms={"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"},
        qkv=("self_attention.query_key_value",),
        dense="self_attention.dense",
        fc="mlp.dense_h_to_4h",
        proj="mlp.dense_4h_to_h",
        final_norm="transformer.ln_f",
        biases=frozenset(("qkv", "dense", "fc", "proj")),
        grouped=True,
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return Decoder(
        norm="layer",
        positions="alibi",
        mlp="plain",
        activation="gelu_tanh",
        attention_scale=1 / math.sqrt(config.head_size),
        alibi_slopes=alibi_slopes(config.num_attention_heads),
        embedding_norm=True,
    )

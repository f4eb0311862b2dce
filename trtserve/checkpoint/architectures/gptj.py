"""GPT-J: parallel attention and MLP behind one layer norm, partially rotated heads with interleaved pairs."""

from __future__ import annotations

import math
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, require_activation, required
from trtserve.checkpoint.architectures.parts.positions import inverse_frequencies
from trtserve.errors import UnsupportedModelError

BASE_PREFIX = "transformer."
TIED = False


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GPTJConfig.

    `gelu` means the tanh approximation; GPTJConfig has no keys for the MLP's size and the rotary base.
    """
    sizes = required(hf, "n_embd", "n_layer", "n_head", "n_positions", "rotary_dim", "vocab_size")
    hidden, heads = sizes["n_embd"], sizes["n_head"]
    require_activation(hf.get("activation_function", "gelu_new"), "gelu_tanh")
    if hf.get("n_inner") not in (None, 4 * hidden):
        raise UnsupportedModelError(
            f"This GPT-J has n_inner = {hf['n_inner']}; TensorRT-LLM's GPT-J needs 4 · n_embd = {4 * hidden}."
        )
    return {
        "hidden_size": hidden,
        "num_hidden_layers": sizes["n_layer"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": sizes["vocab_size"],
        "head_size": hidden // heads,
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "rope_gptj",
        "max_position_embeddings": sizes["n_positions"],
        # Upstream writes the full head size here; rotary_dim holds the rotated part.
        "rotary_embedding_dim": hidden // heads,
        "rotary_dim": sizes["rotary_dim"],
    }


def names(config: CheckpointConfig) -> SourceNames:
    del config
    return SourceNames(
        embedding="transformer.wte",
        layer="transformer.h.{}.",
        norms={"input_layernorm": "ln_1"},
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        dense="attn.out_proj",
        fc="mlp.fc_in",
        proj="mlp.fc_out",
        final_norm="transformer.ln_f",
        biases=frozenset(("fc", "proj", "head")),
        first_rank_bias=True,
        # Causal masks and position tables of old exports.
        unused=tuple(f"transformer.h.*.attn.{name}" for name in ("bias", "masked_bias", "embed_positions")),
    )


def decoder(config: CheckpointConfig) -> Decoder:
    return Decoder(
        norm="layer",
        positions="rope",
        mlp="plain",
        activation="gelu_tanh",
        attention_scale=1 / math.sqrt(config.head_size),
        rope_inv_freq=inverse_frequencies(config.own("rotary_dim", 64), 10000.0, None),
        rope_interleaved=True,
        block="parallel",
        mlp_norm=None,
    )

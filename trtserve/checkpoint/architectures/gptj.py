"""GPT-J: parallel attention and MLP behind one layer norm, partially rotated heads with interleaved pairs."""

from __future__ import annotations

import math
from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Decoder, HfConfig, SourceNames, decoder_sizes, require_activation
from trtserve.checkpoint.architectures.parts.positions import inverse_frequencies
from trtserve.errors import UnsupportedModelError


def checkpoint_config(hf: HfConfig) -> dict[str, Any]:
    """Return the family's part of the checkpoint's config: the keys of TensorRT-LLM 1.2's GPTJConfig.

    `gelu` means the tanh approximation; GPTJConfig has no keys for the MLP's size and the rotary base.
    """
    sizes = decoder_sizes(
        hf,
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
        rotary_dim="rotary_dim",
    )
    inner = 4 * sizes["hidden_size"]
    require_activation(hf.get("activation_function", "gelu_new"), "gelu_tanh")
    if hf.get("n_inner") not in (None, inner):
        raise UnsupportedModelError(
            f"This GPT-J has n_inner = {hf['n_inner']}; TensorRT-LLM's GPT-J needs 4 · n_embd = {inner}."
        )
    return {
        **sizes,  # rotary_embedding_dim is the full head size here, and rotary_dim the rotated part, as upstream
        "intermediate_size": inner,
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "rope_gptj",
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

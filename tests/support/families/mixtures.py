"""Families of experts that TensorRT-LLM's checkpoints lack: gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.families import expected
from tests.support.families.expected import EXPERTS, LAYER_WINDOWS, ROPE_BASE
from tests.support.families.family import Family, Shapes
from tests.support.families.llama_like import LLAMA, YARN, llama_tensors
from tests.support.families.shards import llama_ranks

_COMMON: dict[str, Any] = expected.SIZES | {
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "position_embedding_type": "rope_gpt_neox",
    "rotary_base": 10000.0,
    "rotary_scaling": None,
    "tie_word_embeddings": False,
}


def _gpt_oss_tensors(config: Mapping[str, Any]) -> Shapes:
    hidden, inner, count = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    for name, shape in llama_tensors({key: value for key, value in config.items() if key != "num_experts_per_tok"}):
        if ".mlp." not in name:
            yield name, shape
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}self_attn.sinks", (config["num_attention_heads"],)
        yield f"{prefix}mlp.router.weight", (count, hidden)
        yield f"{prefix}mlp.router.bias", (count,)
        yield f"{prefix}mlp.experts.gate_up_proj", (count, hidden, 2 * inner)
        yield f"{prefix}mlp.experts.gate_up_proj_bias", (count, 2 * inner)
        yield f"{prefix}mlp.experts.down_proj", (count, inner, hidden)
        yield f"{prefix}mlp.experts.down_proj_bias", (count, hidden)


GPT_OSS = Family(
    tensors=_gpt_oss_tensors,
    ranks=llama_ranks,
    config={key: value for key, value in LLAMA.config.items() if key != "rope_theta"}
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 32,
        "attention_bias": True,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        "swiglu_limit": 1.5,
    },
    expected=_COMMON
    | {
        "head_size": 32,
        "rotary_embedding_dim": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "attn_bias": True,
        "rotary_base": 150000.0,
        "moe": expected.DENSE | {"num_experts": 8, "top_k": 2, "normalization_mode": 1},
        "swiglu_alpha": 1.702,
        "swiglu_limit": 1.5,
        "max_attention_window": [24, None],
        "superset": ["attention sinks", "clamped gates and biases of experts"],
    },
    nvidia=False,
    shards=({"vocab_size": 323}, {"num_key_value_heads": 1, "attention_bias": False}),
    logits=(
        {},
        {"rope_parameters": YARN | {"truncate": False}, "sliding_window": 7},
        {"swiglu_alpha": 1.0, "layer_types": ["full_attention", "sliding_attention"], "attention_bias": False},
    ),
    constants=ROPE_BASE | EXPERTS | LAYER_WINDOWS,
)

MIXTURES: dict[str, Family] = {"gpt_oss": GPT_OSS}

"""A model of real size, as its configs describe it: plans need no more."""

from __future__ import annotations

from typing import Any

from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.specs import ConvertSpec

# Sizes of Llama 2 7B as published in its config.json.
LLAMA_2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float16",
}


def llama_2_7b(dtype: str = "float16", quantize: str = "none", **sizes: Any) -> CheckpointConfig:
    """Its checkpoint's config, with other `sizes`."""
    spec = ConvertSpec(dtype=dtype, quantize=quantize)  # type: ignore[arg-type]
    return checkpoint_config(LLAMA_2_7B | sizes, spec)

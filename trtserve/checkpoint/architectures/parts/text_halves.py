"""Models that also take images: which family their text half is, and which tensors are for images.

The text half is converted as if it had been published alone. On text it computes what the whole model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtserve.checkpoint.architectures.base import HfConfig
from trtserve.checkpoint.architectures.parts.positions import rope_parameters, scaling_type
from trtserve.errors import UnsupportedModelError

WITH_IMAGES = frozenset(
    {
        "AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration",
        "Exaone4_5_ForConditionalGeneration", "Gemma3ForConditionalGeneration", "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration", "Idefics3ForConditionalGeneration", "InternVLForConditionalGeneration",
        "Llama4ForConditionalGeneration", "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration", "Mistral3ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration", "SmolVLMForConditionalGeneration", "VipLlavaForConditionalGeneration",
    }
)  # fmt: skip
"""Architectures in config.json whose text half is one of `_HALVES`; Llava with Mistral's text half is Pixtral."""

# What transformers adds to a text_config, which has only what differs from it.
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
_LLAMA_4 = {
    "vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
}  # fmt: skip
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_QWEN_VL_MOE = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408, "num_experts_per_tok": 4,
    "max_position_embeddings": 128000, "rope_theta": 500000.0,
}  # fmt: skip

# `model_type` of the text half → its architecture and defaults. The Qwens without text_config have it in config.json.
_HALVES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "llama4_text": ("Llama4ForCausalLM", _LLAMA_4),
    "mistral": ("MistralForCausalLM", _MISTRAL),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", _QWEN),
    "qwen2_vl": ("Qwen2ForCausalLM", {}),
    "qwen2_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen2_5_vl": ("Qwen2ForCausalLM", {}),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", _QWEN),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {}),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", _QWEN_VL_MOE),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {}),
    "cohere2": ("Cohere2ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "gemma3n_text": ("Gemma3nForCausalLM", {}),
    "gemma4_text": ("Gemma4ForCausalLM", {}),
}

_IMAGES = (
    *("vision_tower", "vision_model", "visual", "multi_modal_projector", "connector", "image_newline"),
    *("embed_vision", "audio_tower", "embed_audio"),  # of Gemma 3n and 4
)
VISION = tuple(f"{prefix}{name}{end}" for prefix in ("", "model.") for name in _IMAGES for end in ("", ".*"))
"""Patterns (fnmatch) of tensors for images: as published, and as transformers 4.52 and later name them."""


def text_config(hf: HfConfig) -> dict[str, Any]:
    """Return the text model's config of a model with images. Raises UnsupportedModelError when there is none.

    Types, tied embeddings and quantisation of the outer config apply to the text model.
    """
    outer, text = hf["architectures"][0], hf.get("text_config")
    if text is None and str(hf.get("model_type")).startswith("qwen2"):
        text = {key: value for key, value in hf.items() if key != "vision_config"}
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            f"config.json of this {outer} has text_config = {text!r}; expected an object.",
            hint="Take config.json from the model's own repository.",
        )
    kind = text.get("model_type") or ("gemma3_text" if outer.startswith("Gemma3") else None)
    if not isinstance(kind, str) or kind not in _HALVES:
        raise UnsupportedModelError(
            f"The text half of this {outer} is a {kind!r:.40}; supported: {', '.join(_HALVES)}.",
            hint="The runtimes vllm and llmapi read the model itself and may run it.",
        )
    architecture, defaults = _HALVES[kind]
    keys = ("torch_dtype", "dtype", "tie_word_embeddings", "quantization_config")
    whole = {key: hf[key] for key in keys if hf.get(key) is not None}
    fixed = {"norm_topk_prob": True} if kind == "qwen3_vl_moe_text" else {}  # transformers reads no such key
    return {**defaults, **text, **whole, **fixed, **_flat_rope(text), "architectures": [architecture]}


def _flat_rope(text: HfConfig) -> dict[str, Any]:
    """Return the rotation of text: images have positions of three numbers (mrope), which are equal for text."""
    parameters = rope_parameters(text)
    if "mrope_section" not in parameters and scaling_type(parameters) != "mrope":
        return {}
    of_images = ("mrope_section", "mrope_interleaved")
    kept = {key: value for key, value in parameters.items() if key not in of_images}
    kept = {key: "default" if value == "mrope" else value for key, value in kept.items()}
    return {"rope_scaling": None, "rope_parameters": kept}

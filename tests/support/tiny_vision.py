"""A random Gemma 3 that sees images too: the text model of `tiny_models`, nested and prefixed as it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.support.tiny_models import Array, read_safetensors, write_safetensors, write_tiny_model

Spelling = Literal["published", "newer"]

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "image_size": 28,
    "intermediate_size": 32,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 14,
    "vision_use_head": False,
}
# Keys that the published text_config does not have.
_OUTER = ("architectures", "dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")


def write_tiny_vision_model(folder: Path, spelling: Spelling = "published", **options: Any) -> Path:
    """Fill `folder` with a random Gemma3ForConditionalGeneration; `options` are those of `write_tiny_model`.

    Tensors are named as in the published files, or as transformers' classes name them since 4.52.
    """
    write_tiny_model(folder, "gemma3", **options)
    config = json.loads((folder / "config.json").read_text())
    outer = {key: config.pop(key) for key in _OUTER if key in config}
    outer |= {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    outer |= {"text_config": config, "vision_config": _VISION, "mm_tokens_per_image": 4}
    outer |= {"boi_token_index": 316, "eoi_token_index": 317, "image_token_index": 318}
    (folder / "config.json").write_text(json.dumps(outer))
    text = read_safetensors(folder / "model.safetensors")
    dtype = next(iter(text.values())).dtype
    prefix = "" if spelling == "published" else "model."
    tensors = {_outer_name(name, spelling): values for name, values in text.items()}
    tensors |= {prefix + name: values for name, values in _vision(config["hidden_size"], dtype).items()}
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _outer_name(name: str, spelling: Spelling) -> str:
    if spelling == "published":
        return f"language_model.{name}"
    return name.replace("model.", "model.language_model.", 1)


def _vision(text_size: int, dtype: np.dtype[Any]) -> dict[str, Array]:
    """SigLIP's tensors and those of the projector."""
    hidden, inner, patches = _VISION["hidden_size"], _VISION["intermediate_size"], 4
    layer = "vision_tower.vision_model.encoder.layers.0."
    matrices = {f"{layer}self_attn.{part}": (hidden, hidden) for part in ("k_proj", "v_proj", "q_proj", "out_proj")}
    matrices |= {f"{layer}mlp.fc1": (inner, hidden), f"{layer}mlp.fc2": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.vision_model.embeddings.patch_embedding.weight": (hidden, 3, 14, 14),
        "vision_tower.vision_model.embeddings.patch_embedding.bias": (hidden,),
        "vision_tower.vision_model.embeddings.position_embedding.weight": (patches, hidden),
        "multi_modal_projector.mm_input_projection_weight": (hidden, text_size),
        "multi_modal_projector.mm_soft_emb_norm.weight": (hidden,),
    }
    for norm in (f"{layer}layer_norm1", f"{layer}layer_norm2", "vision_tower.vision_model.post_layernorm"):
        shapes |= {f"{norm}.weight": (hidden,), f"{norm}.bias": (hidden,)}
    for name, shape in matrices.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    generator = np.random.default_rng(3)
    return {name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}

"""Text halves of models with images, saved by transformers, against the whole models: logits and greedy tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.families import FAMILIES
from tests.support.paged_steps import PagedSteps
from tests.support.transformers_oracle import ENGINES, engine_of
from trtserve.checkpoint.architectures.parts.text_halves import WITH_IMAGES
from trtserve.specs import BuildSpec, ConvertSpec

pytestmark = pytest.mark.needs("torch")

RUNTIME = "torch" if "TRTSERVE_TEST_DEVICE" in os.environ else "openvino"
IDS = np.random.default_rng(5).integers(3, 259, 150).tolist()
SCHEDULE = [{"a": 64}, {"a": 70}, *[{"a": 1}] * 4, {"a": 12}]
MROPE = {"mrope_section": [2, 3, 3], "type": "mrope"}
_SIGLIP = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
_VISION: dict[str, Any] = {**_SIGLIP, "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model"}
_PIXTRAL = {**_VISION, "model_type": "pixtral", "head_dim": 8}
_GEMMA4_VISION = {**_SIGLIP, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8}
_LLAMA4_VISION = {**_SIGLIP, "model_type": "llama4_vision_model", "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "out_hidden_size": 64}
_QWEN3_5_VISION = {**_QWEN_VISION, "intermediate_size": 32, "num_position_embeddings": 16}
_QWEN3_VISION = {
    **_QWEN_VISION,
    "intermediate_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}

# Architecture → model_type, the family of the text half, its model_type where it has another, and the vision config.
HALVES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "AyaVisionForConditionalGeneration": ("aya_vision", "cohere2", {}, _VISION),
    "Cohere2VisionForConditionalGeneration": ("cohere2_vision", "cohere2", {}, _VISION),
    "Exaone4_5_ForConditionalGeneration": ("exaone4_5", "exaone4", {}, {**_QWEN_VISION, "intermediate_size": 32}),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4", {}, _GEMMA4_VISION),
    "Idefics3ForConditionalGeneration": ("idefics3", "llama", {}, _VISION),
    "InternVLForConditionalGeneration": ("internvl", "qwen2", {}, _SIGLIP),
    "Llama4ForConditionalGeneration": ("llama4", "llama4", {}, _LLAMA4_VISION),
    "LlavaForConditionalGeneration": ("llava", "mistral", {}, _PIXTRAL),
    "LlavaNextForConditionalGeneration": ("llava_next", "llama", {}, _VISION),
    "LlavaOnevisionForConditionalGeneration": ("llava_onevision", "qwen2", {}, _VISION),
    "Mistral3ForConditionalGeneration": ("mistral3", "ministral3", {}, _PIXTRAL),
    "Qwen2VLForConditionalGeneration": (
        "qwen2_vl",
        "qwen2",
        {"model_type": "qwen2_vl_text", "rope_scaling": MROPE},
        _QWEN_VISION,
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "qwen2_5_vl",
        "qwen2",
        {"model_type": "qwen2_5_vl_text", "rope_scaling": MROPE},
        _QWEN_VISION,
    ),
    "Qwen3VLForConditionalGeneration": (
        "qwen3_vl",
        "qwen3",
        {
            "model_type": "qwen3_vl_text",
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default"},
        },
        _QWEN3_VISION,
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "qwen3_vl_moe",
        "qwen3_moe",
        {
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 48,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default"},
        },
        _QWEN3_VISION,
    ),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_5", {"model_type": "qwen3_5_text"}, _QWEN3_5_VISION),
    "Qwen3_5MoeForConditionalGeneration": (
        "qwen3_5_moe",
        "qwen3_5_moe",
        {"model_type": "qwen3_5_moe_text"},
        _QWEN3_5_VISION,
    ),
    "SmolVLMForConditionalGeneration": ("smolvlm", "llama", {}, _VISION),
    "VipLlavaForConditionalGeneration": ("vipllava", "llama", {}, _VISION),
}


def write_whole(folder: Path, architecture: str) -> Any:
    """Write a random model with images and return it."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers import AutoConfig

    kind, family, changes, vision = HALVES[architecture]
    if not hasattr(transformers, architecture):
        pytest.skip(f"transformers {transformers.__version__} lacks {architecture}")  # a GPU machine's
    text = {**FAMILIES[family].config, **changes, "tie_word_embeddings": False}
    special = {"image_token_id": 318, "image_token_index": 318, "video_token_id": 319, "vision_start_token_id": 317}
    outer = {"model_type": kind, "text_config": text, "vision_config": vision, **special, "tie_word_embeddings": False}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(outer))
    model = getattr(transformers, architecture)(AutoConfig.from_pretrained(folder)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = torch.randn(values.shape, generator=generator)
            if "norm" in name:
                values.copy_(1 + 0.1 * noise)
            else:
                values.copy_(noise * (0.4 if "embed" in name or "lm_head" in name else 1 / values.shape[-1] ** 0.5))
    model.save_pretrained(folder)
    if family == "qwen3_5_moe":  # published with the experts of a layer in one tensor
        save_file(model.state_dict(), folder / "model.safetensors")
    if architecture == "Qwen3VLMoeForConditionalGeneration":  # published with these tensors as [experts, in, out]
        turned = {
            name: values.transpose(1, 2).contiguous() if ".experts." in name else values
            for name, values in model.state_dict().items()
        }
        save_file(turned, folder / "model.safetensors")
    return model


def paged(engine: Path) -> Any:
    """Load an engine in this machine's runtime; machines with GPUs need no OpenVINO."""
    if RUNTIME == "torch":
        from trtserve.executor.torch.model import load_model

        return load_model(engine, None)
    from trtserve.executor.openvino.paged_model import PagedModel

    return PagedModel(engine, threads=1)


@pytest.mark.parametrize("architecture", HALVES, ids=lambda name: f"{name}_on_{RUNTIME}")
def test_a_text_half_computes_what_the_whole_model_does(architecture: str, tmp_path: Path) -> None:
    import torch

    model = write_whole(tmp_path / "model", architecture)
    if architecture.startswith("Llama4"):  # transformers 5.24's whole model fails after its text half
        model = model.language_model
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    if HALVES[architecture][1] == "cohere2":
        theirs *= FAMILIES["cohere2"].config["logit_scale"]  # transformers 5.24 forgets it in models with images
    engine = engine_of(
        tmp_path / "model",
        tmp_path,
        ConvertSpec(dtype="float32"),
        BuildSpec(max_seq_len=256, **ENGINES[RUNTIME]),
    )
    ours = PagedSteps(paged(engine.path), {"a": IDS}).run(SCHEDULE)["a"]
    shares = np.sqrt(np.square(ours - theirs).mean(axis=-1)) / theirs.std()
    # A delta rule adds up rounding errors: float64 is as far from transformers as from ours.
    assert shares.max() < (3e-5 if "qwen3_5" in HALVES[architecture][1] else 1e-5)


def test_every_architecture_with_images_is_compared() -> None:
    # Gemma 3 and 3n have tests of their own. transformers builds Gemma 3n's half for images with timm, which is absent.
    assert WITH_IMAGES - {f"Gemma{kind}ForConditionalGeneration" for kind in ("3", "3n")} == HALVES.keys()

"""Small PEFT adapters in folders, as PEFT's save_pretrained writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_models import write_safetensors

PREFIX = "base_model.model.model.layers"


def write_adapter(
    folder: Path,
    *,
    modules: dict[str, tuple[int, int]],
    layers: int = 2,
    rank: int = 4,
    seed: int = 0,
    extra: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """An adapter of random matrices; `modules` maps `self_attn.q_proj` … to (inputs, outputs); `extra` are tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "tiny", **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    random = np.random.default_rng(seed)
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        for module, (inputs, outputs) in modules.items():
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                name = f"{PREFIX}.{layer}.{module}.lora_{part}.weight"
                tensors[name] = random.normal(scale=0.1, size=shape).astype(np.float32)
    write_safetensors(folder / "adapter_model.safetensors", {**tensors, **(extra or {})})
    return folder

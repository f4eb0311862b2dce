"""Makes the goldens: greedy tokens and logits of tiny random models in transformers, float32 on the CPU.

Run as `python -m tests.golden.make_goldens` in the repository root; needs torch. Each golden carries the hash of this
file and of the weights, so that a stale one is noticed on a machine without torch.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.support.tiny_models import write_tiny_model

HERE = Path(__file__).parent
NEW_TOKENS = 24
# Logits of the last prompt token that are kept: every 20th of the vocabulary.
STRIDE = 20
# A golden whose best two logits come closer than this would depend on the order of float32 sums.
MIN_MARGIN = 0.01

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "seed": 1},
    "llama_bias": {"family": "llama", "seed": 3, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "llama3": {"family": "llama3", "seed": 2},
    "llama_linear": {"family": "llama_linear", "seed": 4},
    "mistral": {"family": "mistral", "seed": 11},
    "mistral_window": {"family": "mistral", "seed": 20, "sliding_window": 32},
    "qwen2": {"family": "qwen2", "seed": 40},
    "qwen3": {"family": "qwen3", "seed": 41},
    "gemma": {"family": "gemma", "seed": 40},
    "gemma2": {"family": "gemma2", "seed": 40, "attn_logit_softcapping": None, "tie_word_embeddings": False},
    "gemma3": {"family": "gemma3", "seed": 40, "tie_word_embeddings": False},
    "gpt2": {"family": "gpt2", "seed": 30},
}

PROMPTS: list[list[int]] = [
    [1, *b"What is ML?"],
    [1, 40],
    [1, *(3 + (7 * index * index + index) % 256 for index in range(89))],
]


def main() -> None:
    """Write one JSON file per model next to this script."""
    for name in MODELS:
        text = json.dumps(make(name), indent=1)
        (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def make(name: str) -> dict[str, Any]:
    """Content of one golden."""
    import torch
    from transformers import AutoModelForCausalLM

    options = MODELS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = write_tiny_model(Path(place), **options)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return {
        "script_sha256": script_hash(),
        "weights_sha256": weights,
        "model": options,
        "logits_stride": STRIDE,
        "cases": [_case(name, model, prompt) for prompt in PROMPTS],
    }


def script_hash() -> str:
    """SHA-256 of this file."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _case(name: str, model: Any, prompt: list[int]) -> dict[str, Any]:
    """Greedy decoding without a cache: every step computes the whole sequence anew."""
    import torch

    ids, rows = list(prompt), []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            if best - second < MIN_MARGIN:
                raise SystemExit(f"{name}: margin {best - second:.4f} after {len(ids)} tokens; choose another seed")
            ids.append(int(logits.argmax()))
            rows.append(logits)
    return {
        "prompt": prompt,
        "tokens": ids[len(prompt) :],
        "logits": [round(value, 5) for value in rows[0][::STRIDE].tolist()],
    }


if __name__ == "__main__":
    main()

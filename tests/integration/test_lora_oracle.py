"""Converted adapters change a model's matrices as PEFT does: patterns, rsLoRA and ranks as PEFT understands them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtserve.lora import CONFIG, WEIGHTS, convert_adapter

# PEFT asks transformers for a name that this has renamed.
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

WORDS = {1: "q_proj", 2: "k_proj", 3: "v_proj", 4: "o_proj", 5: "gate_proj", 6: "down_proj", 7: "up_proj"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"v_proj": 2, r"layers\.1\.self_attn\.q_proj": 6},
        "alpha_pattern": {r"layers\.0\.mlp\.up_proj": 1, "q_proj": 3},
    },
}


def saved_adapter(folder: Path, **settings: Any) -> dict[tuple[int, str], Any]:
    """Let PEFT make and save an adapter of a tiny Llama; (layer, module) → the matrix that it adds."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    spec = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(WORDS.values()), init_lora_weights=False, **settings)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), spec)
    model.save_pretrained(str(folder))
    added = {}
    for layer, block in enumerate(model.base_model.model.model.layers):
        for part in (block.self_attn, block.mlp):
            for name, module in part.named_children():
                if hasattr(module, "get_delta_weight"):
                    added[layer, name] = module.get_delta_weight("default").detach().numpy()
    return added


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_rows_hold_what_peft_adds(tmp_path: Path, settings: dict[str, Any]) -> None:
    added = saved_adapter(tmp_path / "adapter", **settings)
    adapter = convert_adapter(tmp_path / "adapter", storage_type="float32")
    weights, table = np.load(adapter.path / WEIGHTS)[0], np.load(adapter.path / CONFIG)[0]
    assert len(table) == len(added) == 14
    for row, (number, layer, rank) in zip(weights, table.tolist(), strict=True):
        expected = added[layer, WORDS[number]]
        outputs, inputs = expected.shape
        first = row[: rank * inputs].reshape(rank, inputs)
        second = row[rank * inputs : rank * (inputs + outputs)].reshape(outputs, rank)
        np.testing.assert_allclose(second @ first, expected, rtol=1e-5, atol=1e-6)
        assert not row[rank * (inputs + outputs) :].any()

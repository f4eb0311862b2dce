"""Names, scales and rows of PEFT adapters, against values worked out by hand."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtserve.checkpoint.lora_adapter import (
    MODULES,
    AdapterConfig,
    Pair,
    StorageType,
    adapter_arrays,
    adapter_config,
    match_names,
    module_row,
)
from trtserve.errors import ConversionError, CorruptFileError, UnsupportedModelError

LAYERS = "base_model.model.model.layers"


def names(*modules: str, part: str = "AB") -> list[str]:
    return [f"{LAYERS}.{module}.lora_{letter}.weight" for module in modules for letter in part]


def pair(module: str = "q_proj", layer: int = 0) -> Pair:
    (found,) = match_names(names(f"{layer}.self_attn.{module}"))
    return found


def config(**content: Any) -> AdapterConfig:
    return adapter_config({"peft_type": "LORA", "lora_alpha": 16, "r": 8, **content})


def test_module_ids() -> None:
    assert {name: number for name, (_, number) in MODULES.items()} == {
        "qkv_proj": 0, "query_key_value": 0, "q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "dense": 4,
        "gate_proj": 5, "gate_up_proj": 5, "c_fc": 5, "down_proj": 6, "c_proj": 6, "up_proj": 7,
        "w1": 13, "w2": 14, "w3": 15, "gate": 16,
    }  # fmt: skip


def test_modules_are_sorted_by_layer() -> None:
    given = names("10.mlp.down_proj", "2.self_attn.q_proj", "10.self_attn.v_proj", "2.block_sparse_moe.gate")
    pairs = match_names(given)
    assert [(each.layer, each.module, each.target) for each in pairs] == [
        (10, "down_proj", "mlp_4h_to_h"),
        (10, "v_proj", "attn_v"),
        (2, "q_proj", "attn_q"),
        (2, "gate", "moe_router"),
    ]
    assert pairs[0].path == "model.layers.10.mlp.down_proj"
    assert pairs[0].first == f"{LAYERS}.10.mlp.down_proj.lora_A.weight"


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight",
        f"{LAYERS}.0.self_attn.q_proj.lora_A.bias",
        f"{LAYERS}.0.input_layernorm.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.lora_B.weight",
    ],
)
def test_a_tensor_that_would_be_left_out_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"The adapter has {re.escape(name)}, which TensorRT-LLM's LoRA"):
        match_names([*names("0.self_attn.q_proj"), name])


def test_two_modules_with_one_number_are_refused() -> None:
    vision = [name.replace("model.model.layers", "model.vision_tower.layers") for name in names("0.self_attn.q_proj")]
    with pytest.raises(UnsupportedModelError, match=r"both model\.layers\.0\.\S+ and vision_tower\.layers\.0"):
        match_names([*names("0.self_attn.q_proj"), *vision])


def test_an_adapter_without_tensors_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="has no tensors"):
        match_names([])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{LAYERS}.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        (f"{LAYERS}.0.block_sparse_moe.experts.3.w1.lora_A.weight", "single experts"),
        (f"{LAYERS}.0.self_attn.rotary.lora_A.weight", "no LoRA module"),
    ],
)
def test_inexpressible_modules_are_refused(name: str, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        match_names([name])


def test_module_with_one_matrix_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="not the module's other matrix"):
        match_names(names("0.self_attn.q_proj", part="B"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 16 / 8**0.5),
        ({"alpha_pattern": {"k_proj": 4}}, 2.0),
        ({"alpha_pattern": {"q_proj": 4}}, 0.5),
        ({"alpha_pattern": {r"layers\.[01]\.self_attn\.q_proj": 2.0, "q_proj": 4}}, 0.25),
        ({"alpha_pattern": {"proj": 4}}, 2.0),
        ({"rank_pattern": {"q_proj": 8}}, 2.0),
    ],
)
def test_scale(content: dict[str, Any], expected: float) -> None:
    assert config(**content).scale("model.layers.0.self_attn.q_proj", 8) == pytest.approx(expected)


def test_rank_follows_the_matrices() -> None:
    row, rank = module_row(
        pair(), np.ones((2, 3), np.float32), np.ones((5, 2), np.float32), config(rank_pattern={"q_proj": 2}), "float32"
    )
    assert rank == 2
    assert row.tolist() == [1.0] * 6 + [8.0] * 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "lora_only"),
        ({"lora_bias": True}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
    ],
)
def test_refused_configurations(content: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        config(**content)


def test_config_without_alpha_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="lora_alpha = None"):
        config(lora_alpha=None)


def test_row_is_in_weight_then_scaled_out_weight() -> None:
    first = np.arange(6, dtype=np.float32).reshape(2, 3)
    second = np.arange(8, dtype=np.float32).reshape(4, 2)
    row, _ = module_row(pair(), first, second, config(lora_alpha=1), "float32")
    assert row.tolist() == [0, 1, 2, 3, 4, 5, 0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]


def test_halves_of_gate_up_are_swapped() -> None:
    first, second = np.ones((1, 2), np.float32), np.array([[1], [2], [3], [4]], np.float32)
    row, _ = module_row(pair("gate_up_proj"), first, second, config(lora_alpha=1), "float32")
    assert row.tolist() == [1, 1, 3, 4, 1, 2]


def test_scale_is_applied_in_the_adapter_type() -> None:
    """1 + 2⁻⁷ times 1.5 is no bfloat16: it is rounded there, although float32 is stored."""
    second = np.full((1, 1), 1.0078125, ml_dtypes.bfloat16)
    row, _ = module_row(pair(), second, second, config(lora_alpha=1.5), "float32")
    assert row.tolist() == [1.0078125, 1.515625]


def test_mismatched_matrices_are_refused() -> None:
    with pytest.raises(CorruptFileError, match=r"is \[2, 3\] and .* is \[4, 3\]"):
        module_row(pair(), np.ones((2, 3)), np.ones((4, 3)), config(), "float16")


def test_overflowing_values_are_refused() -> None:
    large = np.full((1, 1), 6e4, np.float32)
    with pytest.raises(ConversionError, match=r"q_proj exceed the range of float16"):
        module_row(pair(), large, large, config(lora_alpha=2), "float16")
    module_row(pair(), large, large, config(lora_alpha=2), "bfloat16")


@pytest.mark.parametrize(("storage", "kind"), [("float16", "<f2"), ("float32", "<f4"), ("bfloat16", "|V2")])
def test_arrays(storage: StorageType, kind: str) -> None:
    rows = []
    for layer, outputs in ((3, 2), (0, 5)):
        first, second = np.ones((1, 2), np.float32), np.full((outputs, 1), 2, np.float32)
        rows.append((pair(layer=layer), *module_row(pair(), first, second, config(lora_alpha=1), storage)))
    weights, table = adapter_arrays(rows, storage)
    assert (weights.shape, weights.dtype.str) == ((1, 2, 7), kind)
    assert table.dtype == np.int32
    assert table.tolist() == [[[1, 3, 1], [1, 0, 1]]]
    numbers = weights.view(ml_dtypes.bfloat16) if storage == "bfloat16" else weights
    assert numbers.astype(np.float32).tolist() == [[[1, 1, 2, 2, 0, 0, 0], [1, 1, 2, 2, 2, 2, 2]]]


@pytest.mark.parametrize(
    "content",
    [
        {"alpha_pattern": ["q_proj"]},
        {"alpha_pattern": "q_proj"},
        {"alpha_pattern": {"q_proj": "4"}},
        {"alpha_pattern": {"q_proj": None}},
        {"alpha_pattern": {"q_proj": float("nan")}},
        {"alpha_pattern": {"a" * 1001: 4}},
        {"lora_alpha": float("inf")},
        {"lora_alpha": 10**400},
        {"lora_alpha": True},
        *({"r": rank} for rank in (0, -5, 10**12, float("nan"), 8.5, "8", True, None)),
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": ["q_proj"]},
        {"target_modules": ["q_proj"] * 100_000},
        {"target_modules": ["q_proj", 5]},
        {"target_modules": {"q_proj": 1}},
        {"target_modules": ["a" * 1001]},
        {"target_modules": "a" * 70_000},
        {"exclude_modules": [None]},
    ],
)
def test_numbers_and_patterns_of_other_types_are_refused(content: dict[str, Any]) -> None:
    with pytest.raises(CorruptFileError, match=r"adapter_config\.json has "):
        config(**content)


def test_modules_may_be_chosen_by_a_long_expression() -> None:
    config(target_modules="|".join(f"model.layers.{layer}.self_attn.q_proj" for layer in range(200)))


@pytest.mark.parametrize("pattern", ["[", "a\\"])
def test_invalid_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(CorruptFileError, match="an alpha_pattern that cannot be used"):
        config(alpha_pattern={pattern: 4}).scale("model.layers.0.self_attn.q_proj", 8)

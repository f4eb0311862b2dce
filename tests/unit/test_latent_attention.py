"""Latent attention: what is refused, and what the cache holds of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.families import FAMILIES
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.memory import kv_bytes_per_token
from trtserve.checkpoint.supported import supported_family
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.executor import embedded
from trtserve.specs import BuildSpec


def checkpoint_config(name: str, **changes: Any) -> CheckpointConfig:
    hf = FAMILIES[name].config | changes
    return CheckpointConfig.of(supported_family(hf).checkpoint_config(hf) | {"architecture": hf["architectures"][0]})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v3", {"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ("deepseek_v3", {"n_group": 3}, "n_group = 3"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group = 1"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "first_k_dense_replace = 3"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "'gelu'"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias = true"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
    ],
)
def test_odd_configs_are_refused_by_name(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        checkpoint_config(family, **changes)


def test_the_cache_holds_one_vector_for_all_heads() -> None:
    """A latent vector of 512 and a rotated key of 64 numbers, as key and as value, in each of two layers."""
    config = checkpoint_config("deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=4)
    assert kv_bytes_per_token(config, "bf16") == 2 * 2 * (512 + 64) * 2


def test_adapters_are_refused() -> None:
    with pytest.raises(UsageError, match="adapters of DeepseekV3ForCausalLM are not supported"):
        embedded._require_module(checkpoint_config("deepseek_v3"), "attn_q")


@pytest.mark.needs("torch")
def test_torch_holds_the_vector_once() -> None:
    from trtserve.executor.torch.runtime import TorchRuntime

    changes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 4}
    config = replace(checkpoint_config("deepseek_v3", **changes), dtype="bfloat16")
    plan = TorchRuntime().plan(config, BuildSpec(runtime="torch", device="cpu"))
    assert plan.kv_bytes_per_token == kv_bytes_per_token(config, plan.kv_precision) / 2

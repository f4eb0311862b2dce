"""Weight-only quantisation is left to the loader of each release: its rule takes the weights that ours takes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.families import FAMILIES
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures import checkpoint_targets
from trtserve.checkpoint.quantized import is_quantised
from trtserve.pipeline.checkpoint_config import checkpoint_config
from trtserve.specs import ConvertSpec

# How the names of the weights end that TensorRT-LLM's loader quantises (`weight_only_quantize_dict`), and an exception.
QUANTISED = ("qkv.weight", "dense.weight", "fc.weight", "proj.weight", "gate.weight")
# Ours, of latent attention and of the small matrices beside attention (Gemma 3n).
BEYOND = ("q_a.weight", "q_b.weight", "kv_a.weight", "beside.left.weight", "beside.right.weight")
LEFT_OUT = "shared_expert_gate.weight"


def _config(name: str, **spec: Any) -> CheckpointConfig:
    return checkpoint_config(FAMILIES[name].config, ConvertSpec(**spec))


@pytest.mark.parametrize("name", FAMILIES)
def test_loader_and_cpu_runtime_quantise_the_same_weights(name: str) -> None:
    config = _config(name, quantize="int8")
    # The loader leaves nothing out beyond its default when no module is excluded.
    assert config.quantization.exclude_modules == ()
    for target in checkpoint_targets(config):
        loader = target.name.endswith((*QUANTISED, *BEYOND)) and not target.name.endswith(LEFT_OUT)
        assert loader == is_quantised(target), target.name

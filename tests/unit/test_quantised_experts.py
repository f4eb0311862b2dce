"""Models with quantised experts, and models quantised in part: their checkpoints, and what is refused."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.quantised_models import (
    EXPERT_SIZES,
    GROUP,
    ROUTERS,
    fused,
    read_any_safetensors,
    write_quantised_model,
)
from tests.support.stages import convert_model
from trtserve.artifacts import Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.quantized import unpack_int4
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.pipeline.convert_own import plan_own_conversion
from trtserve.specs import ConvertSpec

EXPERTS = EXPERT_SIZES | {"num_local_experts": 4}
EXCLUDED = ["*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding", "*shared_expert_gate"]


@pytest.mark.parametrize(
    ("kept", "names"),
    [
        ("down_proj", ["transformer.layers.*.mlp.proj"]),
        (r"layers\.1\.self_attn", ["transformer.layers.1.attention.qkv", "transformer.layers.1.attention.dense"]),
    ],
)
def test_float_modules_are_recorded(tmp_path: Path, kept: str, names: list[str]) -> None:
    """TensorRT-LLM's list replaces the patterns that it has without one."""
    model = write_quantised_model(tmp_path, "awq", kept=kept)
    checkpoint = convert_model(Model(path=model.folder), ConvertSpec(), out=tmp_path / "made").path
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["quantization"]["exclude_modules"] == [*EXCLUDED, *names]
    reader = CheckpointReader(checkpoint)
    for part, expected in fused(model, 1).items():
        name = f"transformer.layers.1.{part}.weight"
        is_float = any(fnmatch.fnmatch(name.removesuffix(".weight"), pattern) for pattern in names)
        assert reader.kind(name) == ("float" if is_float else "int4")
        np.testing.assert_array_equal(reader.merged(name), expected)


def test_pipeline_stages_with_different_quantised_modules_are_refused(tmp_path: Path) -> None:
    """Layers have the numbers of their stage in the names that say what is left as floats."""
    model = write_quantised_model(tmp_path, "awq", kept=r"layers\.1\.self_attn")
    with pytest.raises(UsageError, match=r"attention\.qkv is quantised in some layers"):
        plan_own_conversion(Model(path=model.folder), ConvertSpec(pp_size=2))


@pytest.mark.parametrize(
    ("kept", "message"),
    [("w1", r"w3\.weight is quantised .*w1\.weight is not"), ("w2", "all experts of a layer or none")],
)
def test_partially_quantised_experts_are_refused(tmp_path: Path, kept: str, message: str) -> None:
    model = write_quantised_model(tmp_path, "awq", "mixtral", kept=rf"{ROUTERS}|{kept}\.", **EXPERTS)
    with pytest.raises(UnsupportedModelError, match=message):
        plan_own_conversion(Model(path=model.folder), ConvertSpec())


def test_four_bit_experts(tmp_path: Path) -> None:
    """Rank 3 of 4, which share out 4 experts and split each in two: its experts 2 and 3, the second half of each.

    [experts, in, out / 4] and scales [experts, in / group, out]; the order of Ampere, whatever the GPU.
    """
    model = write_quantised_model(tmp_path, "awq", "mixtral", **EXPERTS)
    spec = ConvertSpec(tp_size=4, moe_ep_size=2, gpu_sm=90)
    checkpoint = convert_model(Model(path=model.folder), spec, out=tmp_path / "made").path
    tensors = read_any_safetensors(checkpoint / "rank3.safetensors")
    prefix, half = "transformer.layers.1.mlp", slice(256, 512)
    assert tensors[f"{prefix}.router.weight"].dtype == np.float32
    for name, shape in {"fc": (2, 256, 512), "proj": (2, 256, 256)}.items():
        experts, inputs, outputs = shape
        assert tensors[f"{prefix}.{name}.weight"].shape == (experts, inputs, outputs // 4)
        assert tensors[f"{prefix}.{name}.zero"].shape == (experts, inputs // GROUP, outputs)
    for number, expert in enumerate((2, 3)):
        up, gate, down = (
            model.weights[f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight"]
            for part in ("w3", "w1", "w2")
        )
        for name, expected in {"fc": np.concatenate([up[half], gate[half]]), "proj": down[:, half]}.items():
            own = {
                key: tensors[f"{prefix}.{name}.{key}"][number] for key in ("weight", "weights_scaling_factor", "zero")
            }
            found = unpack_int4(
                {f"x.{key}": value for key, value in own.items()},
                "x",
                CheckpointConfig.of({"trtserve": {"gpu_sm": 80}}),
            )
            np.testing.assert_array_equal(found.dequantized(), expected)


def test_fp8_experts(tmp_path: Path) -> None:
    """A scale for each expert, that of the larger of its two fused matrices; one for all inputs."""
    model = write_quantised_model(tmp_path, "fp8", "mixtral", **EXPERTS)
    checkpoint = convert_model(Model(path=model.folder), ConvertSpec(), out=tmp_path / "made").path
    tensors = read_any_safetensors(checkpoint / "rank0.safetensors")
    name = "transformer.layers.0.mlp.fc"
    scales = tensors[f"{name}.weights_scaling_factor"]
    assert (scales.shape, tensors[f"{name}.activation_scaling_factor"].shape) == ((4, 1), (1,))
    for expert in range(4):
        parts = [
            model.weights[f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight"] for part in ("w3", "w1")
        ]
        found = tensors[f"{name}.weight"][expert].astype(np.float32) * scales[expert]
        np.testing.assert_allclose(found, np.concatenate(parts), rtol=2**-4, atol=2**-12)
    with pytest.raises(UnsupportedModelError, match="ModelOpt"):
        unpack_int4(tensors, name, CheckpointConfig.of({"quantization": {"quant_algo": "W4A16_AWQ"}}))


def test_old_loaders_lack_4_bit_experts(tmp_path: Path) -> None:
    model = Model(path=write_quantised_model(tmp_path, "awq", "mixtral", **EXPERTS).folder)
    assert plan_own_conversion(model, ConvertSpec(trtllm_version="1.0")).packed
    with pytest.raises(UnsupportedModelError, match=r"0\.16: .* 4-bit experts"):
        plan_own_conversion(model, ConvertSpec(trtllm_version="0.16"))

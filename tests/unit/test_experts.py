"""Experts: how ranks share them, the router's own type, what is refused, and what the decoder is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.families import FAMILIES
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_tiny_model
from trtserve.artifacts import Checkpoint, Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig, ParallelMapping
from trtserve.checkpoint import architectures
from trtserve.checkpoint.architectures.base import Experts
from trtserve.checkpoint.sharding import moe_parallel_sizes
from trtserve.checkpoint.supported import supported_family
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.cli import run
from trtserve.errors import UnsupportedModelError, UsageError
from trtserve.pipeline.build import plan_build
from trtserve.pipeline.convert import plan_conversion
from trtserve.specs import BuildSpec, ConvertSpec

WITH_EXPERTS = [name for name, family in FAMILIES.items() if family.experts and family.stages]


def convert(folder: Path, out: Path, **spec: Any) -> Checkpoint:
    return convert_model(Model(path=folder), ConvertSpec(**spec), out=out)


def checkpoint_config(folder: Path, **changes: Any) -> dict[str, Any]:
    hf = json.loads((folder / "config.json").read_text()) | changes
    return supported_family(hf).checkpoint_config(hf) | {"architecture": hf["architectures"][0]}


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_ranks_split_experts(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, shards=3)
    hf = json.loads((folder / "config.json").read_text())
    source = {name: values for path in folder.glob("*.safetensors") for name, values in read_safetensors(path).items()}
    (whole,) = FAMILIES[family].ranks(source, hf, 1)
    for tp, ep in ((2, 2), (4, 2), (4, 4)):
        out = convert(folder, tmp_path / f"{tp} {ep}", tp_size=tp, moe_ep_size=ep, dtype="float32").path
        for rank, wanted in enumerate(FAMILIES[family].ranks(source, hf, tp, ep)):
            actual = read_safetensors(out / f"rank{rank}.safetensors")
            assert actual.keys() == wanted.keys()
            for name, values in wanted.items():
                np.testing.assert_array_equal(actual[name], values, err_msg=f"{name}, {tp} ranks, {ep} for experts")
        mapping = json.loads((out / "config.json").read_text())["mapping"]
        assert (mapping["tp_size"], mapping["moe_tp_size"], mapping["moe_ep_size"]) == (tp, tp // ep, ep)
        reader = CheckpointReader(out)
        for name, values in whole.items():
            np.testing.assert_array_equal(reader.merged(name), values, err_msg=f"{name}, {tp} ranks, {ep} for experts")


@pytest.mark.parametrize(
    ("stated", "ep_size"), [((-1, -1), 1), ((None, -1), 1), ((2, -1), 2), ((4, -1), 1), ((-1, 2), 2)], ids=str
)
def test_a_size_of_minus_one_follows_from_the_others(stated: tuple[int | None, int], ep_size: int) -> None:
    assert ParallelMapping(tp_size=4, moe_tp_size=stated[0], moe_ep_size=stated[1]).moe_ep_size == ep_size


@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_the_router_stays_float32(tmp_path: Path, family: str, source: str) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, dtype=source, num_hidden_layers=2)
    hf = json.loads((folder / "config.json").read_text())
    (whole,) = FAMILIES[family].ranks(read_safetensors(folder / "model.safetensors"), hf, 1)
    expected = whole["transformer.layers.1.mlp.router.weight"]
    out = convert(folder, tmp_path / "out", tp_size=2, pp_size=2, dtype="bfloat16").path
    for rank in (2, 3):
        tensors = read_safetensors(out / f"rank{rank}.safetensors")
        router = tensors.pop("transformer.layers.0.mlp.router.weight")
        assert router.dtype == np.float32
        np.testing.assert_array_equal(router, expected)
        others = {values.dtype for name, values in tensors.items() if ".mlp.router." not in name}
        assert others == {np.dtype(ml_dtypes.bfloat16)}
    size = (out / "rank2.safetensors").stat().st_size
    plan = plan_conversion(Model(path=folder), ConvertSpec(tp_size=2, pp_size=2, dtype="bfloat16"))
    assert plan.work.sizes[2] == size


@pytest.mark.parametrize(
    ("given", "sizes"),
    [((4, None, None), (4, 1)), ((4, 2, None), (2, 2)), ((4, None, 4), (1, 4)), ((4, 4, 1), (4, 1))],
)
def test_moe_tp_and_ep_sizes_complete_each_other(
    given: tuple[int, int | None, int | None], sizes: tuple[int, int]
) -> None:
    assert moe_parallel_sizes(*given) == sizes


@pytest.mark.parametrize("given", [(4, 2, 1), (4, 3, None), (4, None, 8), (1, 2, None)])
def test_product_of_moe_sizes_must_equal_tp_size(given: tuple[int, int | None, int | None]) -> None:
    with pytest.raises(UsageError, match=f"--tp-size {given[0]} must equal --moe-tp-size × --moe-ep-size"):
        moe_parallel_sizes(*given)


@pytest.mark.parametrize(
    ("family", "changes", "spec", "message"),
    [
        ("mixtral", {"num_local_experts": 6}, {"tp_size": 4, "moe_ep_size": 4}, "6 experts do not divide by"),
        ("mixtral", {"intermediate_size": 130}, {"tp_size": 4}, "size 130 does not divide by --moe-tp-size 4"),
        ("qwen2_moe", {"moe_intermediate_size": 34}, {"tp_size": 4}, "size 34 does not divide by --moe-tp-size 4"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 98},
            {"tp_size": 4, "moe_ep_size": 4},
            "shared expert's intermediate size 98 does not divide by 4",
        ),
        ("llama", {}, {"tp_size": 2, "moe_ep_size": 2}, "need a model with experts"),
    ],
)
def test_indivisible_expert_sizes_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], spec: dict[str, Any], message: str
) -> None:
    folder = write_tiny_model(tmp_path / "hf", family, **changes)
    with pytest.raises(UsageError, match=message):
        plan_conversion(Model(path=folder), ConvertSpec(**spec))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("mixtral", {"intermediate_size": 130}), ("qwen3_moe", {"intermediate_size": 130}), ("qwen3_moe", {})],
)
def test_expert_parallelism_allows_indivisible_expert_widths(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """Experts that are dealt out stay whole; a Qwen's intermediate size is that of layers that it has not."""
    folder = write_tiny_model(tmp_path / "hf", family, **changes)
    plan = plan_conversion(Model(path=folder), ConvertSpec(tp_size=4, moe_ep_size=4))
    assert plan.config.intermediate_size == changes.get("intermediate_size", 128)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": 1}, "num_local_experts = 1"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9"),
        ("mixtral", {"hidden_act": "gelu"}, "'gelu'"),
        ("qwen2_moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "lacks shared_expert_intermediate_size"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("qwen3_moe", {"num_experts": None}, "lacks num_experts"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
    ],
)
def test_unsupported_expert_configs_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        checkpoint_config(write_tiny_model(tmp_path, family), **changes)


def test_mixtral_defaults_equal_those_of_transformers() -> None:
    hf = {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "intermediate_size": 64,
        "vocab_size": 320,
    }
    config = supported_family(hf).checkpoint_config(hf)
    assert (config["num_key_value_heads"], config["norm_epsilon"], config["rotary_base"]) == (8, 1e-5, 1e6)
    assert (config["moe"]["num_experts"], config["moe"]["top_k"]) == (8, 2)


@pytest.mark.parametrize(
    ("family", "changes", "experts"),
    [
        ("mixtral", {}, Experts(count=8, chosen=2, renormalized=True)),
        ("qwen2_moe", {}, Experts(count=8, chosen=3, renormalized=False, shared=True)),
        ("qwen2_moe", {"norm_topk_prob": True}, Experts(count=8, chosen=3, renormalized=True, shared=True)),
        ("qwen3_moe", {}, Experts(count=8, chosen=3, renormalized=True)),
    ],
)
def test_decoders_describe_routing(tmp_path: Path, family: str, changes: dict[str, Any], experts: Experts) -> None:
    config = checkpoint_config(write_tiny_model(tmp_path, family), **changes)
    module = architectures.family(config["architecture"])
    decoder = module.decoder(CheckpointConfig.of(config))
    assert (decoder.mlp, decoder.activation, decoder.experts) == ("experts", "silu", experts)
    assert decoder.qk_norm == ("heads" if family == "qwen3_moe" else None)
    flat = {key: value for key, value in config.items() if key != "moe"} | {"moe_num_experts": 8, "moe_top_k": 2}
    with pytest.raises(UnsupportedModelError, match="has no `moe` object"):
        module.decoder(CheckpointConfig.of(flat))
    config["moe"]["normalization_mode"] = 2
    with pytest.raises(UnsupportedModelError, match="normalization_mode 2"):
        module.decoder(CheckpointConfig.of(config))


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mixtral", {"sliding_window": 64}, (64,)),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 2}, (24, None)),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 0}, ()),
        ("qwen2_moe", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, (None, 24)),
        ("qwen3_moe", {"use_sliding_window": True}, (24,)),
        ("qwen3_moe", {}, ()),
    ],
)
def test_windows_follow_the_family(
    tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = checkpoint_config(write_tiny_model(tmp_path, family), **changes)
    assert architectures.family(config["architecture"]).decoder(CheckpointConfig.of(config)).windows == windows


@pytest.mark.parametrize("module", ["mlp_h_to_4h", "mlp_gate", "moe_h_to_4h", "moe_router"])
def test_adapters_of_experts_are_refused(tmp_path: Path, module: str) -> None:
    checkpoint = convert(write_tiny_model(tmp_path / "hf", "mixtral"), tmp_path / "out")
    with pytest.raises(UsageError, match=f"{module}: adapters of experts"):
        plan_build(checkpoint, BuildSpec(lora_plugin="auto", lora_target_modules=(module,)))


def test_moe_flags_reach_the_mapping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "tiny", "mixtral")
    out = tmp_path / "out"
    assert run(["convert", str(folder), "--tp-size", "4", "--moe-tp-size", "2", "--out", str(out), "--quiet"]) == 0
    mapping = json.loads((out / "config.json").read_text())["mapping"]
    assert (mapping["moe_tp_size"], mapping["moe_ep_size"]) == (2, 2)
    assert run(["convert", str(folder), "--tp-size", "4", "--moe-tp-size", "2", "--moe-ep-size", "4"]) == 2
    assert "must equal --moe-tp-size × --moe-ep-size = 2 × 4" in capsys.readouterr().err

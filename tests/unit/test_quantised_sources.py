"""Models that are already quantised: every bit of their checkpoints, taken apart by hand, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.quantised_models import (
    GROUP,
    Array,
    QuantisedModel,
    fused,
    read_any_safetensors,
    write_any_safetensors,
    write_quantised_model,
)
from tests.support.recorded_progress import Lines
from tests.support.stages import convert_model
from tests.support.tiny_models import write_tiny_model
from trtserve.artifacts import Model
from trtserve.artifacts.checkpoint_config import CheckpointConfig
from trtserve.checkpoint.architectures.base import Target
from trtserve.checkpoint.quantized import from_kernel, to_kernel, unpack_int4
from trtserve.checkpoint.quantized_tensors import require_divisible
from trtserve.checkpoint.unified import CheckpointReader, read_config
from trtserve.errors import ConversionError, CorruptFileError, UnsupportedModelError, UsageError
from trtserve.pipeline.convert import plan_conversion
from trtserve.pipeline.convert_own import plan_own_conversion
from trtserve.specs import ConvertSpec

# Which of 32 inputs comes where in the kernels' order, and which of 8 codes (TensorRT-LLM, cutlass_preprocessors.cpp).
ROWS = [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27, 4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23]
ROWS += [30, 31]
EVEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]

Made = Callable[[str], QuantisedModel]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    models: dict[str, QuantisedModel] = {}

    def make(scheme: str) -> QuantisedModel:
        if scheme not in models:
            models[scheme] = write_quantised_model(tmp_path_factory.mktemp(scheme), scheme)
        return models[scheme]

    return make


def test_kernel_layout() -> None:
    """Code by code: where the code of an input and an output lies in the bytes."""
    inputs, outputs = 128, 8
    codes = np.random.default_rng(0).integers(-8, 8, (inputs, outputs)).astype(np.int8)
    for sm in (80, 90):
        packed = to_kernel(codes, sm).reshape(-1)
        for k in range(inputs):
            position = k // 32 * 32 + ROWS.index(k % 32)
            for n in range(outputs):
                place = n * inputs + position
                if sm == 80:
                    tile = n // 4 * (inputs // 64) + position // 64
                    place = (tile * 4 + n % 4) * 64 + position % 64
                place = place // 8 * 8 + EVEN_FIRST.index(place % 8)
                assert (packed[place // 2] >> 4 * (place % 2)) & 15 == codes[k, n] + 8
        assert (from_kernel(to_kernel(codes, sm), sm) == codes.T + 8).all()
    assert (to_kernel(codes, 120) == to_kernel(codes, 80)).all()


def value_by_hand(tensors: Mapping[str, Array], name: str, k: int, n: int) -> float:
    """One weight as the kernel computes it: (code − 8) × scale + zero."""
    packed = tensors[f"{name}.weight"]
    inputs = packed.shape[0]
    position = k // 32 * 32 + ROWS.index(k % 32)
    tile = n // 4 * (inputs // 64) + position // 64
    place = (tile * 4 + n % 4) * 64 + position % 64
    place = place // 8 * 8 + EVEN_FIRST.index(place % 8)
    code = int(np.ascontiguousarray(packed).view(np.uint8).reshape(-1)[place // 2] >> 4 * (place % 2)) & 15
    scale = float(tensors[f"{name}.weights_scaling_factor"][k // GROUP, n])
    return (code - 8) * scale + float(tensors[f"{name}.zero"][k // GROUP, n])


@pytest.mark.parametrize("scheme", ["awq", "gptq", "gptq_asym", "gptq_v2"])
def test_four_bit_checkpoint(made: Made, tmp_path: Path, scheme: str) -> None:
    model = made(scheme)
    checkpoint = convert_model(Model(path=model.folder), ConvertSpec(), out=tmp_path / "made").path
    config = json.loads((checkpoint / "config.json").read_text())
    quantization = config["quantization"]
    assert quantization["quant_algo"] == "W4A16_GPTQ"
    assert (quantization["group_size"], quantization["has_zero_point"]) == (GROUP, True)
    assert (config["dtype"], config["trtserve"]) == ("float16", {"gpu_sm": 80})
    tensors = read_any_safetensors(checkpoint / "rank0.safetensors")
    generator = np.random.default_rng(1)
    for layer in range(2):
        for part, expected in fused(model, layer).items():
            name = f"transformer.layers.{layer}.{part}"
            outputs, inputs = expected.shape
            assert tensors[f"{name}.weight"].shape == (inputs, outputs // 4)
            assert tensors[f"{name}.weights_scaling_factor"].shape == (inputs // GROUP, outputs)
            assert tensors[f"{name}.zero"].shape == (inputs // GROUP, outputs)
            places = zip(generator.integers(0, inputs, 200), generator.integers(0, outputs, 200), strict=True)
            for k, n in [(0, 0), (0, 1), (inputs - 1, outputs - 1), *places]:
                # `zero` is rounded to float16: at most 8 scales × 2⁻¹¹.
                bound = float(tensors[f"{name}.weights_scaling_factor"][k // GROUP, n]) * 2**-8
                assert value_by_hand(tensors, name, int(k), int(n)) == pytest.approx(expected[n, k], abs=bound, rel=0)


@pytest.mark.parametrize("scheme", ["awq", "gptq_asym", "float_quantized"])
@pytest.mark.parametrize(("tp_size", "pp_size", "gpu_sm"), [(1, 2, 90), (2, 1, 80), (4, 1, 90), (2, 2, 89)])
def test_ranks_together_hold_the_matrix(
    made: Made, tmp_path: Path, scheme: str, tp_size: int, pp_size: int, gpu_sm: int
) -> None:
    """Merged from all ranks, every weight is what the codes of the original stand for."""
    model = made(scheme)
    spec = ConvertSpec(tp_size=tp_size, pp_size=pp_size, gpu_sm=gpu_sm)
    reader = CheckpointReader(convert_model(Model(path=model.folder), spec, out=tmp_path / "made").path)
    for layer in range(2):
        for part, expected in fused(model, layer).items():
            name = f"transformer.layers.{layer}.{part}.weight"
            found = reader.merged(name)
            if scheme == "float_quantized" and part == "attention.qkv":
                # One scale for all three: what had smaller ones is rounded once more, to 3 bits of mantissa.
                np.testing.assert_allclose(found, expected, rtol=2**-4, atol=float(np.abs(expected).max()) * 2**-15)
            else:
                np.testing.assert_array_equal(found, expected)


def test_rank_of_four_bits(made: Made, tmp_path: Path) -> None:
    """Rank 1 of 4: its heads (the key/value head that it shares with rank 0), its inputs of `dense`."""
    model = made("awq")
    checkpoint = convert_model(Model(path=model.folder), ConvertSpec(tp_size=4), out=tmp_path / "made").path
    tensors = read_any_safetensors(checkpoint / "rank1.safetensors")
    config = read_config(checkpoint)
    whole = fused(model, 0)
    head, hidden = 64, 256
    rows = [*range(head, 2 * head), *range(hidden, hidden + head), *range(hidden + 2 * head, hidden + 3 * head)]
    for part, expected in (
        ("attention.qkv", whole["attention.qkv"][rows]),
        ("attention.dense", whole["attention.dense"][:, head : 2 * head]),
        ("mlp.proj", whole["mlp.proj"][:, 128:256]),
    ):
        found = unpack_int4(tensors, f"transformer.layers.0.{part}", config)
        np.testing.assert_array_equal(found.dequantized(), expected)
    with pytest.raises(CorruptFileError, match=r"lacks the tensor transformer\.layers\.9"):
        unpack_int4(tensors, "transformer.layers.9.mlp.fc", config)


@pytest.mark.parametrize("scheme", ["fp8", "float_quantized"])
def test_fp8_checkpoint(made: Made, tmp_path: Path, scheme: str) -> None:
    model = made(scheme)
    checkpoint = convert_model(Model(path=model.folder), ConvertSpec(), out=tmp_path / "made").path
    quantization = json.loads((checkpoint / "config.json").read_text())["quantization"]
    assert (quantization["quant_algo"], quantization["kv_cache_quant_algo"]) == ("FP8", None)
    tensors = read_any_safetensors(checkpoint / "rank0.safetensors")
    for part, expected in fused(model, 1).items():
        name = f"transformer.layers.1.{part}"
        scale = tensors[f"{name}.weights_scaling_factor"]
        assert scale.dtype == np.float32
        assert scale.shape == (1,)
        assert tensors[f"{name}.activation_scaling_factor"] == np.array([0.25], np.float32)
        assert tensors[f"{name}.weight"].dtype == ml_dtypes.float8_e4m3fn
        if part != "attention.qkv":
            np.testing.assert_array_equal(tensors[f"{name}.weight"].astype(np.float32) * scale, expected)
    assert tensors["lm_head.weight"].dtype == np.float16


def test_modelopt_layout() -> None:
    """W4A16_AWQ of ModelOpt: signed codes, two outputs in a byte, and factors of the inputs."""
    generator = np.random.default_rng(3)
    signed = generator.integers(-8, 8, (16, 128))
    scales = generator.random((16, 2), dtype=np.float32)
    factors = generator.random(128, dtype=np.float32)
    nibbles = (signed & 15).astype(np.uint8)
    tensors: dict[str, Array] = {
        "x.weight": (nibbles[0::2] | (nibbles[1::2] << 4)).view(np.int8),
        "x.weights_scaling_factor": scales,
        "x.prequant_scaling_factor": factors,
    }
    found = unpack_int4(
        tensors, "x", CheckpointConfig.of({"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 64}})
    )
    assert (found.group_size, found.zero_points) == (64, None)
    expected = signed.astype(np.float32) * np.repeat(scales, 64, 1) * factors
    np.testing.assert_array_equal(found.dequantized(), expected)


def test_a_config_that_is_no_object_is_refused(made: Made, tmp_path: Path) -> None:
    config = json.loads((made("awq").folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": ["awq"]}))
    with pytest.raises(UnsupportedModelError, match=r"quantization_config of config\.json is") as caught:
        plan_own_conversion(Model(path=tmp_path), ConvertSpec())
    assert "--converter upstream" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"quantize": "int8"}, UsageError, "already quantised"),
        ({"dtype": "float32"}, UsageError, "no float32 checkpoint"),
        ({"gpu_sm": 103}, UnsupportedModelError, r"compute capability 10\.3"),
    ],
)
def test_refused_options(made: Made, spec: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_own_conversion(Model(path=made("gptq").folder), ConvertSpec(**spec))


@pytest.mark.parametrize(("scheme", "counts"), [("gptq", True), ("fp8", False), (None, False)])
def test_gpu_sm_affects_only_4_bit_weights(made: Made, tmp_path: Path, scheme: str | None, counts: bool) -> None:
    model = Model(path=made(scheme).folder if scheme else write_tiny_model(tmp_path / "model"))
    plans = [plan_conversion(model, ConvertSpec(gpu_sm=gpu_sm)) for gpu_sm in (80, 90)]
    assert (plans[0].fingerprint != plans[1].fingerprint) is counts


def test_padded_sizes_are_refused(tmp_path: Path) -> None:
    model = write_quantised_model(tmp_path, "gptq", intermediate_size=192)
    with pytest.raises(UsageError, match=r"mlp\.fc\.weight has size 192, which is not a multiple of 128"):
        plan_own_conversion(Model(path=model.folder), ConvertSpec(tp_size=2))


@pytest.mark.parametrize(("inputs", "fits"), [(288, False), (384, True)])
def test_group_sizes_unlike_kernel_tiles(inputs: int, fits: bool) -> None:
    """Groups of 96 inputs in tiles of 64: every 192 inputs both end."""
    target = Target(name="transformer.layers.0.mlp.fc.weight", sources=("x.weight",), shape=(192, inputs), layer=0)
    with nullcontext() if fits else pytest.raises(UsageError, match="288, which is not a multiple of 192"):
        require_divisible([target], 96, 1)


def rewritten(model: QuantisedModel, folder: Path, change: Callable[[dict[str, Array]], None]) -> Path:
    """The quantised model with other tensors."""
    tensors = read_any_safetensors(model.folder / "model.safetensors")
    change(tensors)
    (folder / "config.json").write_text((model.folder / "config.json").read_text())
    write_any_safetensors(folder / "model.safetensors", tensors)
    return folder


KEY = "model.layers.1.self_attn.k_proj"


def test_gptq_zero_biases_are_skipped(made: Made, tmp_path: Path) -> None:
    def add_bias(tensors: dict[str, Array]) -> None:
        tensors[f"{KEY}.bias"] = np.zeros(128, np.float16)

    assert plan_own_conversion(Model(path=rewritten(made("gptq"), tmp_path, add_bias)), ConvertSpec()).packed


CACHE_SCALES = ["self_attn.k_proj.k_scale", "self_attn.k_scale", "self_attn.q_scale", "self_attn.kv_scale"]


@pytest.mark.parametrize("name", CACHE_SCALES)
def test_kv_cache_scales_are_skipped(made: Made, tmp_path: Path, name: str) -> None:
    def add_scale(tensors: dict[str, Array]) -> None:
        tensors[f"model.layers.1.{name}"] = np.ones((), np.float32)

    plan = plan_own_conversion(Model(path=rewritten(made("fp8"), tmp_path, add_scale)), ConvertSpec())
    assert plan.packed
    assert plan.narrow_cache is ("q_scale" not in name)


def test_modelopt_hf_quant_config_is_read(made: Made, tmp_path: Path) -> None:
    """Its older exports have no quantization_config."""
    folder = rewritten(made("fp8"), tmp_path, lambda _: None)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    described = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": described}))
    plan = plan_own_conversion(Model(path=folder), ConvertSpec())
    assert plan.config.quantization.quant_algo == "FP8"
    assert plan.config.quantization.kv_cache_quant_algo is None
    assert plan.narrow_cache
    assert plan.packed


@pytest.mark.parametrize("scheme", [{"type": "float", "num_bits": 8}, None])
def test_skipped_8_bit_kv_cache_is_reported(made: Made, tmp_path: Path, scheme: dict[str, Any] | None) -> None:
    folder = rewritten(made("float_quantized"), tmp_path, lambda _: None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (folder / "config.json").write_text(json.dumps(config))
    lines = Lines()
    convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "checkpoint", progress=lines)
    words = "The model's 8-bit KV cache is left out: keys and values of a GPU engine are float16"
    assert (words in lines.lines) is (scheme is not None)


def test_autogptq_quantize_config_is_read(made: Made, tmp_path: Path) -> None:
    """Its older exports have no quantization_config, and a file of weights with a name of its own."""
    folder = rewritten(made("gptq"), tmp_path, lambda _: None)
    config = json.loads((folder / "config.json").read_text())
    expected = plan_own_conversion(Model(path=folder), ConvertSpec())
    described = config.pop("quantization_config")
    del described["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(described | {"damp_percent": 0.01}))
    plan = plan_own_conversion(Model(path=folder), ConvertSpec())
    assert (plan.config, plan.headers) == (expected.config, expected.headers)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"gptq_model-4bit-128g\.safetensors; expected") as caught:
        plan_own_conversion(Model(path=folder), ConvertSpec())
    assert "rename it, or link it, to model.safetensors" in (caught.value.hint or "")


def _bias(tensors: dict[str, Array]) -> None:
    tensors[f"{KEY}.bias"] = np.ones(128, np.float16)


def _missing(tensors: dict[str, Array]) -> None:
    del tensors[f"{KEY}.qzeros"]


def _misshaped(tensors: dict[str, Array]) -> None:
    tensors[f"{KEY}.scales"] = tensors[f"{KEY}.scales"][1:]


def _reordered(tensors: dict[str, Array]) -> None:
    tensors[f"{KEY}.g_idx"] = tensors[f"{KEY}.g_idx"][::-1]


def _both(tensors: dict[str, Array]) -> None:
    tensors[f"{KEY}.weight"] = np.ones((128, 256), np.float16)


def _float_key(tensors: dict[str, Array]) -> None:
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{KEY}.{part}"]
    _both(tensors)


def _all_floats(tensors: dict[str, Array]) -> None:
    for name in [name for name in tensors if name.endswith(".qweight")]:
        outputs, inputs = tensors[name].shape[1], tensors.pop(name).shape[0] * 8
        tensors[name.replace("qweight", "weight")] = np.ones((outputs, inputs), np.float16)
        for part in ("qzeros", "scales"):
            del tensors[name.replace("qweight", part)]


def _quantised_head(tensors: dict[str, Array]) -> None:
    del tensors["lm_head.weight"]
    tensors["lm_head.qweight"] = np.ones((32, 320), np.int32)


def _codes_of_another_type(tensors: dict[str, Array]) -> None:
    tensors[f"{KEY}.qweight"] = np.zeros_like(tensors[f"{KEY}.qweight"], np.float16)


def _whole_scales(tensors: dict[str, Array]) -> None:
    tensors[f"{KEY}.scales"] = tensors[f"{KEY}.scales"].astype(np.int32)


def _short_order(tensors: dict[str, Array]) -> None:
    tensors[f"{KEY}.g_idx"] = tensors[f"{KEY}.g_idx"][:64]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_quantised_head, UnsupportedModelError, r"lm_head\.qweight is quantised"),
        (_codes_of_another_type, UnsupportedModelError, r"k_proj\.qweight is F16; expected I32"),
        (_whole_scales, UnsupportedModelError, r"k_proj\.scales is I32; expected BF16, F16, F32"),
        (_short_order, ConversionError, r"k_proj\.g_idx is \[64\], expected \[256\]"),
        (_bias, ConversionError, r"not known: .*k_proj\.bias"),
        (_missing, ConversionError, r"missing: .*k_proj\.qzeros"),
        (_misshaped, ConversionError, r"k_proj\.scales is \[3, 128\], expected \[4, 128\]"),
        (_reordered, UnsupportedModelError, "reorders its inputs"),
        (_both, ConversionError, r"not known: .*k_proj\.weight"),
        (_float_key, UnsupportedModelError, r"q_proj\.weight is quantised \(gptq\) but .*k_proj\.weight is not; .*qkv"),
        (_all_floats, ConversionError, "none of its layers is"),
    ],
)
def test_damaged_sources(
    made: Made, tmp_path: Path, change: Callable[[dict[str, Array]], None], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_own_conversion(Model(path=rewritten(made("gptq"), tmp_path, change)), ConvertSpec())


@pytest.mark.parametrize(
    ("scheme", "part", "value", "hint"),
    [
        ("gptq_asym", "scales", 60000.0, "bfloat16"),  # times 8 − a zero point of 1: beyond float16
        ("gptq", "scales", float("nan"), "Fetch"),
        ("awq", "scales", float("inf"), "Fetch"),
        ("fp8", "weight_scale", float("nan"), "Fetch"),
        ("fp8", "weight_scale", 0.0, "Fetch"),
        ("fp8", "input_scale", -1.0, "Fetch"),
    ],
)
def test_invalid_scales_are_refused(
    made: Made, tmp_path: Path, scheme: str, part: str, value: float, hint: str
) -> None:
    def damage(tensors: dict[str, Array]) -> None:
        tensors[f"{KEY}.{part}"] = np.full_like(tensors[f"{KEY}.{part}"], value)

    (tmp_path / "model").mkdir()
    folder = rewritten(made(scheme), tmp_path / "model", damage)
    with pytest.raises(ConversionError, match=r"not finite|cannot be a scale") as caught:
        convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "out")
    assert hint in str(caught.value.hint)
    assert not (tmp_path / "out").exists()

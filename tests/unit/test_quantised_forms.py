"""Every published form that is read as floats: each number, any rows of it, whole conversions, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.lies import VALUES, lie
from tests.support.quantised_forms import FORMS, Array, Form
from tests.support.quantised_models import (
    SCHEMES,
    fused,
    read_any_safetensors,
    write_any_safetensors,
    write_quantised_model,
)
from tests.support.stages import convert_model
from trtserve.artifacts import Model
from trtserve.checkpoint.gguf import TYPES
from trtserve.checkpoint.source import SourceTensor, read_source
from trtserve.checkpoint.supported import keepable_fp8, source_quantization, widened_by
from trtserve.checkpoint.unified import CheckpointReader
from trtserve.errors import ConversionError, CorruptFileError, UnsupportedModelError, UsageError
from trtserve.specs import ConvertSpec

STEM = "model.layers.0.mlp.up_proj."
# The folder of a form needs no other tensor than these.
SHAPE = (96, 384)


def written(folder: Path, form: Form, change: Callable[[dict[str, Array]], None] = lambda parts: None) -> Array:
    """Write one matrix in a form to a model folder; return its floats."""
    weight = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    parts, expected = form.quantise(weight)
    change(parts)
    (folder / "config.json").write_text(json.dumps({"quantization_config": form.config}))
    write_any_safetensors(folder / "model.safetensors", {STEM + ending: part for ending, part in parts.items()})
    return expected


def test_every_number_of_every_form(tmp_path: Path) -> None:
    for name, form in FORMS.items():
        folder = tmp_path / name
        folder.mkdir()
        expected = written(folder, form)
        found: Mapping[str, SourceTensor] = read_source(folder, "model.")
        assert found.keys() == {f"{STEM}weight"}, name
        matrix = found[f"{STEM}weight"]
        assert (matrix.entry.shape, matrix.entry.code) == (SHAPE, "F32"), name
        assert matrix.encoding is not None, name
        for first, count in ((0, 96), (5, 1), (7, 80), (95, 1), (48, 8)):
            rows = matrix.encoding.rows(first, count)
            assert rows.dtype == np.float32, name
            # NVFP4 divides by a power of two, and int8 of bitsandbytes multiplies by 1 / 127 as its tool does
            np.testing.assert_allclose(rows, expected[first : first + count], rtol=3e-7, err_msg=name)


def test_the_documented_table_is_what_is_tested() -> None:
    text = (Path(__file__).parents[2] / "docs/how-to/quantised-models.md").read_text()
    table = text.partition("<!-- forms:")[2].partition("| Form | Read |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert {name for name, _ in cells} == FORMS.keys() | SCHEMES.keys()
    for name, read in cells:
        config = {"quantization_config": SCHEMES[name] if name in SCHEMES else FORMS[name].config}
        kept = source_quantization(config)
        demanded = keepable_fp8(config)
        widened = "widened" if demanded is None else f"kept on demand, {demanded}"
        assert read == (widened if kept is None else f"kept, {kept.checkpoint_keys()['quant_algo']}"), name
    blocks = sum(kind.numbers > 1 for kind in TYPES.values())  # tests/unit/test_gguf.py takes each
    assert f"**{len(cells) + 1 + blocks} quantised forms**: the {len(cells)} of this table, MXFP4 and {blocks}" in text


@pytest.mark.parametrize(
    "form", ["fp8, blocks of 128", "gptq, desc_act", "compressed-tensors, W4A16", "bitsandbytes, nf4, nested"]
)
def test_conversions_hold_the_floats(form: str, tmp_path: Path) -> None:
    model = write_quantised_model(tmp_path, form)
    for tp_size, pp_size in ((2, 1), (1, 2)):
        spec = ConvertSpec(dtype="float32", tp_size=tp_size, pp_size=pp_size)
        made = convert_model(Model(path=model.folder), spec, out=tmp_path / f"{tp_size} {pp_size}").path
        reader = CheckpointReader(made)
        assert json.loads((made / "config.json").read_text())["quantization"]["quant_algo"] is None
        for layer in range(2):
            for part, expected in fused(model, layer).items():
                np.testing.assert_array_equal(reader.merged(f"transformer.layers.{layer}.{part}.weight"), expected)


KEPT = [
    ("fp8, blocks of 128", "FP8_BLOCK_SCALES"),
    ("fp8, blocks with exponents", "FP8_BLOCK_SCALES"),
    ("compressed-tensors, float by block", "FP8_BLOCK_SCALES"),
    ("modelopt, FP8_PB_WO", "FP8_BLOCK_SCALES"),
    ("fp8, dynamic", "FP8_PER_CHANNEL_PER_TOKEN"),
    ("fbgemm_fp8", "FP8_PER_CHANNEL_PER_TOKEN"),
    ("compressed-tensors, float by channel", "FP8_PER_CHANNEL_PER_TOKEN"),
    ("compressed-tensors, float by tensor, dynamic", "FP8_PER_CHANNEL_PER_TOKEN"),
    ("modelopt, FP8_PER_CHANNEL_PER_TOKEN", "FP8_PER_CHANNEL_PER_TOKEN"),
]


@pytest.mark.parametrize(("form", "algorithm"), KEPT)
def test_kept_codes_stand_for_the_same_numbers(form: str, algorithm: str, tmp_path: Path) -> None:
    model = write_quantised_model(tmp_path, form, num_attention_heads=2, head_dim=128)
    for number, (tp_size, pp_size) in enumerate(((1, 1), (2, 1), (1, 2))):
        spec = ConvertSpec(keep_fp8=True, tp_size=tp_size, pp_size=pp_size)
        made = convert_model(Model(path=model.folder), spec, out=tmp_path / f"{number}").path
        quantization = json.loads((made / "config.json").read_text())["quantization"]
        assert (quantization["quant_algo"], quantization["exclude_modules"]) == (algorithm, None)
        reader = CheckpointReader(made)
        for layer in range(2):
            for part, expected in fused(model, layer).items():
                name = f"transformer.layers.{layer}.{part}.weight"
                assert reader.kind(name) == "fp8"
                np.testing.assert_array_equal(reader.merged(name), expected)


def test_ranks_that_cut_blocks_widen_the_matrix(tmp_path: Path) -> None:
    """Four ranks have 64 of 256 inputs of `dense`, and as many outputs of `qkv`."""
    model = write_quantised_model(tmp_path, "fp8, blocks of 128", num_key_value_heads=4)
    spec = ConvertSpec(keep_fp8=True, tp_size=4, dtype="bfloat16")
    made = convert_model(Model(path=model.folder), spec, out=tmp_path / "made").path
    excluded = json.loads((made / "config.json").read_text())["quantization"]["exclude_modules"]
    assert {f"transformer.layers.*.attention.{part}" for part in ("qkv", "dense")} <= set(excluded)
    reader, expected = CheckpointReader(made), fused(model, 0)
    assert reader.kind("transformer.layers.0.mlp.fc.weight") == "fp8"
    np.testing.assert_array_equal(reader.merged("transformer.layers.0.mlp.fc.weight"), expected["mlp.fc"])
    dense = reader.merged("transformer.layers.0.attention.dense.weight")
    np.testing.assert_array_equal(dense, expected["attention.dense"].astype(dense.dtype))


@pytest.mark.parametrize(
    ("form", "spec", "message"),
    [
        ("fp8", {}, "keep-fp8 is for models"),
        ("compressed-tensors, W8A8 by channel", {}, "keep-fp8 is for models"),
        ("fp8, dynamic", {"dtype": "float32"}, "keep-fp8 is for models"),
        ("fp8, dynamic", {"quantize": "int8"}, "keep-fp8 is for models"),
        ("fp8, blocks of 128", {"tp_size": 8}, "no matrix of the model"),
    ],
)
def test_what_cannot_be_kept_is_refused(form: str, spec: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = write_quantised_model(tmp_path, form, num_attention_heads=8, num_key_value_heads=8)
    with pytest.raises(UsageError, match=message):
        convert_model(Model(path=model.folder), ConvertSpec(keep_fp8=True, **spec), out=tmp_path / "made")


@pytest.mark.parametrize(("ending", "value"), [("weight", 0x7F), ("weight_scale_inv", np.float32(np.nan))])
def test_kept_codes_are_numbers(ending: str, value: Any, tmp_path: Path) -> None:
    model = write_quantised_model(tmp_path, "fp8, blocks of 128")
    path = model.folder / "model.safetensors"
    tensors = read_any_safetensors(path)
    name = f"model.layers.1.mlp.up_proj.{ending}"
    damaged = tensors[name].copy()
    damaged.view(np.uint8 if ending == "weight" else np.float32)[-1, -1] = value
    write_any_safetensors(path, tensors | {name: damaged})
    with pytest.raises(ConversionError, match="not numbers"):
        convert_model(Model(path=model.folder), ConvertSpec(keep_fp8=True), out=tmp_path / "made")


def test_what_is_read_as_floats_may_be_quantised_again(tmp_path: Path) -> None:
    model = write_quantised_model(tmp_path, "fp8, blocks of 128")
    made = convert_model(Model(path=model.folder), ConvertSpec(quantize="int8"), out=tmp_path / "made").path
    assert json.loads((made / "config.json").read_text())["quantization"]["quant_algo"] == "W8A16"


def test_zero_biases_of_gptq_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ adds them to every matrix of some families."""
    model = write_quantised_model(tmp_path, "gptq, desc_act")
    path = model.folder / "model.safetensors"
    tensors, name = read_any_safetensors(path), "model.layers.1.mlp.up_proj.bias"
    write_any_safetensors(path, tensors | {name: np.zeros(512, np.float16)})
    convert_model(Model(path=model.folder), ConvertSpec(), out=tmp_path / "made")
    write_any_safetensors(path, tensors | {name: np.ones(512, np.float16)})
    with pytest.raises(ConversionError, match=r"not known: .*up_proj\.bias"):
        convert_model(Model(path=model.folder), ConvertSpec(), out=tmp_path / "other")


def changed(ending: str, make: Callable[[Array], Array | None]) -> Callable[[dict[str, Array]], None]:
    def change(parts: dict[str, Array]) -> None:
        made = make(parts.pop(ending))
        if made is not None:
            parts[ending] = made

    return change


DAMAGED: list[tuple[str, Callable[[dict[str, Array]], None], str]] = [
    ("fp8, blocks of 128", changed("weight_scale_inv", lambda _: None), "has no weight_scale_inv or weight_scale"),
    ("fp8, blocks of 128", changed("weight_scale_inv", lambda scales: scales[:, 1:]), r"is \[1, 2\]; .* \[1, 3\]"),
    ("fp8, blocks of 128", changed("weight_scale_inv", lambda scales: scales.astype(np.int32)), "is I32"),
    ("fbgemm_fp8", changed("weight_scale", lambda scales: scales * np.float32(np.nan)), "not numbers"),
    ("fp8, blocks with exponents", changed("weight_scale_inv", lambda s: np.full_like(s, np.nan)), "not numbers"),
    ("compressed-tensors, W4A16", changed("weight_scale", lambda scales: scales[1:]), r"is \[95, 6\]"),
    ("compressed-tensors, W4A16", changed("weight_packed", lambda codes: codes.astype(np.int64)), "is I64"),
    ("compressed-tensors, W4A16 with zero points", changed("weight_zero_point", lambda z: z[1:]), r"is \[11, 6\]"),
    ("compressed-tensors, W4A16 with actorder", changed("weight_g_idx", lambda order: order + 1), "one of 6 groups"),
    ("compressed-tensors, W8A8 with zero points", changed("weight_zero_point", lambda z: z[:1, 0]), r"calls? for"),
    ("gptq, desc_act", changed("g_idx", lambda order: -order), "one of 6 groups"),
    ("gptq, desc_act", changed("g_idx", lambda order: order[1:]), "one of 6 groups"),
    ("gptq, desc_act", changed("qzeros", lambda _: None), "has no qzeros"),
    ("gptq, desc_act", changed("scales", lambda scales: scales[1:]), r"is \[5, 96\]; .* \[6, 96\]"),
    ("gptq, one group", changed("qzeros", lambda zeros: zeros[:, 1:]), r"is \[1, 11\]"),
    ("modelopt, NVFP4", changed("weight_scale_2", lambda scale: np.ones(2, np.float32)), r"is \[2\]"),
    ("modelopt, NVFP4", changed("weight_scale", lambda scales: scales[:, 1:]), r"is \[96, 23\]"),
    ("bitsandbytes, nf4", changed("weight.absmax", lambda largest: largest[1:]), r"is \[575\]"),
    ("bitsandbytes, nf4", changed("weight.quant_state.bitsandbytes__nf4", lambda _: np.zeros(8, np.uint8)), "state"),
    (
        "bitsandbytes, nf4",
        changed(
            "weight.quant_state.bitsandbytes__nf4",
            lambda _: np.frombuffer(b'{"shape": [96, 99999999999], "blocksize": 64}', np.uint8),
        ),
        "not the state",
    ),
]


def test_damaged_tensors_are_refused(tmp_path: Path) -> None:
    for number, (name, change, message) in enumerate(DAMAGED):
        folder = tmp_path / str(number)
        folder.mkdir()
        written(folder, FORMS[name], change)

        def read(folder: Path = folder) -> None:
            encoding = read_source(folder, "model.")[f"{STEM}weight"].encoding
            assert encoding is not None
            encoding.rows(0, 96)

        with pytest.raises((CorruptFileError, ConversionError), match=message):
            read()


def scheme(name: str, **weights: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(FORMS[name].config))
    config["config_groups"]["group_0"]["weights"] |= weights
    return dict(config)


W4 = "compressed-tensors, W4A16"
PACKED = FORMS[W4].config
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"blocks of \[128\]"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"blocks of \[0, 128\]"),
    ({"quant_method": "fp8", "weight_block_size": [1 << 40, 128]}, "blocks of"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "format e5m2"),
    ({"quant_method": "fp8", "activation_scheme": "sometimes"}, "'sometimes'"),
    ({"quant_method": "gptq", "bits": 5}, "5 bits"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group size 0"),
    ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "group size '128'"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mlp.*": {}}}, "dynamic"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "marlin"),
    ({"quant_method": "gptq", "bits": 4, "desc_act": "false"}, "desc_act = 'false'; expected true or false"),
    ({"quant_method": "awq", "bits": 4, "zero_point": "x"}, "zero_point = 'x'; expected true or false"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": 1}, "load_in_4bit = 1; expected true or false"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "version gemv_fast"),
    ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "llm-awq"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
    ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ({"quant_method": "aqlm"}, "aqlm"),
    ({"quant_method": "hqq"}, "hqq"),
    ({"quant_method": "quanto"}, "quanto"),
    ({"quant_method": "torchao"}, "torchao"),
    ({"quant_method": "eetq"}, "eetq"),
    ({"quant_method": "auto-round"}, "auto-round"),
    (PACKED | {"format": "marlin-24"}, "marlin-24"),
    (PACKED | {"quantization_status": "frozen"}, "quantization_status = frozen"),
    (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    (PACKED | {"transform_config": {"config_groups": {}}}, "transform_config"),
    (
        PACKED | {"config_groups": {"g": PACKED["config_groups"]["group_0"] | {"output_activations": {"num_bits": 8}}}},
        "outputs",
    ),
    (scheme(W4, num_bits=3), "3 bits by group"),
    (scheme(W4, dynamic=True), "dynamic"),
    (scheme(W4, strategy="attn_head"), "attn_head"),
    (scheme("compressed-tensors, float by block", block_structure="128x128"), "128x128"),
]


def test_lies_in_a_quantisation_are_read_or_refused_by_name() -> None:
    chance = random.Random(27)
    lies: list[Any] = list(VALUES)
    for form in FORMS.values():
        for _ in range(10):
            with suppress(ValueError):
                lies.append(json.loads(lie(json.dumps(form.config), chance)))
    for config in lies:
        for read in (source_quantization, widened_by, keepable_fp8):
            for hf in ({"quantization_config": config}, {"text_config": {"quantization_config": config}}):
                with suppress(UnsupportedModelError):
                    read(hf)


def test_other_forms_are_refused_by_name() -> None:
    for config, message in REFUSED:
        with pytest.raises(UnsupportedModelError, match=message) as caught:
            source_quantization({"quantization_config": config})
        assert "--quantize" in str(caught.value.hint)

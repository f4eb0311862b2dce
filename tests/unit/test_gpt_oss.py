"""gpt-oss as it is published: experts in MXFP4, which become the same floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.families import FAMILIES
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import Model
from trtserve.checkpoint.architectures.parts.positions import scaling_type
from trtserve.checkpoint.supported import supported_family
from trtserve.errors import ConversionError, CorruptFileError
from trtserve.specs import ConvertSpec

# e2m1 by its bits: (−1)^sign · (1 + mantissa / 2) · 2^(exponent − 1), and half the mantissa where the exponent is 0.
VALUES = [
    (-1.0) ** (code >> 3)
    * ((code & 1) / 2 if not code >> 1 & 3 else (1 + (code & 1) / 2) * 2.0 ** ((code >> 1 & 3) - 1))
    for code in range(16)
]


def pair(folder: Path, scale: int | None = None) -> tuple[Path, Path]:
    """Write the same model as MXFP4 in two files, and in floats; `scale` replaces the scales."""
    plain = write_tiny_model(folder / "floats", "gpt_oss")
    tensors = {name: values.copy() for name, values in read_safetensors(plain / "model.safetensors").items()}
    random, packed, scales = np.random.default_rng(1), dict[str, Any](), dict[str, Any]()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        codes = random.integers(0, 16, (experts, outputs, inputs // 32, 32), np.uint8)
        exponents = random.integers(100, 127, (experts, outputs, inputs // 32), np.uint8)
        packed[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        scales[f"{name}_scales"] = np.full_like(exponents, scale) if scale else exponents
        floats = np.asarray(VALUES)[codes] * 2.0 ** (exponents[..., None].astype(int) - 127)
        tensors[name] = floats.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(np.float32)
    write_safetensors(plain / "model.safetensors", tensors)
    published = write_tiny_model(folder / "published", "gpt_oss", quantization_config={"quant_method": "mxfp4"})
    (published / "model.safetensors").unlink()
    files = {
        "model-1.safetensors": packed,
        "model-2.safetensors": scales | {k: v for k, v in tensors.items() if f"{k}_blocks" not in packed},
    }
    for file, content in files.items():
        write_safetensors(published / file, content)
    places = {name: file for file, content in files.items() for name in content}
    (published / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return plain, published


def test_empty_rotary_parameters_are_no_yarn_as_in_transformers() -> None:
    config = {key: value for key, value in FAMILIES["gpt_oss"].config.items() if not key.startswith("rope_")}
    for given, kind in (["rope_parameters"], "default"), (["rope_scaling"], "yarn"), ([], "yarn"):
        hf = config | {key: {} for key in given}
        assert scaling_type(supported_family(hf).checkpoint_config(hf)["rotary_scaling"]) == kind


@pytest.mark.parametrize(
    "spec", [{"dtype": "float32"}, {"dtype": "bfloat16", "tp_size": 2}, {"tp_size": 2, "moe_ep_size": 2}], ids=str
)
def test_mxfp4_becomes_the_same_floats(spec: dict[str, Any], tmp_path: Path) -> None:
    ranks = [
        convert_model(
            Model(path=folder), ConvertSpec(**{"dtype": "bfloat16"} | spec), out=tmp_path / folder.name / "out"
        ).path
        for folder in pair(tmp_path)
    ]
    for rank in range(spec.get("tp_size", 1)):
        plain, published = (read_safetensors(folder / f"rank{rank}.safetensors") for folder in ranks)
        assert plain.keys() == published.keys()
        for name, values in plain.items():
            np.testing.assert_array_equal(values, published[name], err_msg=name)


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    _, published = pair(tmp_path, scale=255)
    with pytest.raises(ConversionError, match=r"_proj.* not numbers"):
        convert_model(Model(path=published), ConvertSpec(dtype="bfloat16"), out=tmp_path / "out")


def test_codes_whose_scales_do_not_fit_are_refused(tmp_path: Path) -> None:
    _, published = pair(tmp_path)
    path = published / "model-2.safetensors"
    tensors = read_safetensors(path)
    name = next(name for name in tensors if name.endswith("_scales"))
    write_safetensors(path, tensors | {name: tensors[name][:, :-1]})
    with pytest.raises(CorruptFileError, match="one scale for each group"):
        convert_model(Model(path=published), ConvertSpec(dtype="bfloat16"), out=tmp_path / "out")

"""Checkpoints of AWQ, GPTQ and FP8 models compared with their dequantised originals."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.gguf_files import write_gguf_model
from tests.support.quantised_models import (
    EXPERT_SIZES,
    SIZES,
    read_any_safetensors,
    write_any_safetensors,
    write_quantised_model,
)
from tests.support.stages import build_engine, convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from tests.unit.test_gpt_oss import pair
from trtserve.artifacts import Engine, Model
from trtserve.cli import run
from trtserve.errors import CorruptFileError
from trtserve.pipeline import parity
from trtserve.pipeline.parity import check_checkpoint, check_engine, converted, original
from trtserve.specs import BuildSpec, CheckSpec, ConvertSpec
from trtserve.store import Store

pytestmark = pytest.mark.needs("torch")

SCALES = "mlp.fc.weights_scaling_factor"
PROMPTS = "[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]\n[2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2, 3, 5, 3, 6]\n"


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--verify` has prompts of its own: two of the nine find a wrong scale as well."""
    monkeypatch.setattr(original, "TEXTS", original.TEXTS[:1])
    monkeypatch.setattr(original, "_RANDOM_LENGTHS", (24,))


@pytest.fixture
def asked(tmp_path: Path) -> CheckSpec:
    """Two short prompts."""
    path = tmp_path / "prompts.txt"
    path.write_text(PROMPTS)
    return CheckSpec(max_tokens=8, prompts=path)


@pytest.mark.parametrize(
    ("scheme", "family", "spec", "stages"),
    [
        ("awq", "llama", ConvertSpec(tp_size=2), {"conversion": "float32"}),
        (
            "gptq",
            "llama",
            ConvertSpec(gpu_sm=90, dtype="bfloat16"),
            {"conversion": "bfloat16", "precision": "bfloat16"},
        ),
        ("gptq_v2", "llama", ConvertSpec(pp_size=2), {"conversion": "float32"}),
        ("gptq_asym", "qwen2_moe", ConvertSpec(tp_size=2), {"conversion": "float32"}),
        ("fp8", "llama", ConvertSpec(pp_size=2), {"conversion": "int8"}),
        ("float_quantized", "mixtral", ConvertSpec(), {"conversion": "int8"}),
        ("fp8, blocks of 128", "qwen3_moe", ConvertSpec(dtype="float32"), {"conversion": "float32"}),
        ("fp8, blocks of 128", "llama", ConvertSpec(keep_fp8=True), {"conversion": "float32"}),
        (
            "compressed-tensors, W4A16",
            "llama",
            ConvertSpec(tp_size=2, dtype="bfloat16"),
            {"conversion": "float32", "precision": "bfloat16"},
        ),
    ],
)
def test_quantised_weights_equal_the_original(
    scheme: str, family: str, spec: ConvertSpec, stages: dict[str, str], asked: CheckSpec, tmp_path: Path
) -> None:
    sizes = EXPERT_SIZES if family != "llama" else {}
    model = write_quantised_model(tmp_path / "model", scheme, family, gain=1.0, **sizes)
    checkpoint = convert_model(Model(path=model.folder), spec, out=tmp_path / "checkpoint").path
    report = check_checkpoint(checkpoint, model.folder, asked)
    assert {stage.name: stage.bounds for stage in report.stages} == stages
    assert report.passed, report.described()
    if family == "llama" and scheme not in ("gptq", "compressed-tensors, W4A16"):
        damage(checkpoint)
        assert not check_checkpoint(checkpoint, model.folder, asked).passed


def damage(checkpoint: Path) -> None:
    """The scales of one matrix change places (4 bit), or its first scale is doubled (FP8), in the file itself."""
    path = next(
        path for path in sorted(checkpoint.glob("rank*.safetensors"), reverse=True) if SCALES in str(path.read_bytes())
    )
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = next(entry for name, entry in json.loads(file.read(size)).items() if name.endswith(SCALES))
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        file.seek(begin)
        held = file.read(end - begin)
        file.seek(begin)
        file.write(
            held[2:] + held[:2]
            if entry["dtype"] == "F16"
            else struct.pack("<f", 2 * struct.unpack_from("<f", held)[0]) + held[4:]
        )


def test_a_float_original_is_compared_within_the_quantisation_error(asked: CheckSpec, tmp_path: Path) -> None:
    model = write_quantised_model(tmp_path / "model", "awq", gain=1.0)
    checkpoint = convert_model(Model(path=model.folder), ConvertSpec(), out=tmp_path / "checkpoint").path
    report = check_checkpoint(checkpoint, model.dequantised, asked)
    assert [(stage.name, stage.bounds) for stage in report.stages] == [("precision", "int4")]
    assert report.passed
    assert "calibrating tool" in report.reason


def test_verify_of_a_quantised_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_quantised_model(tmp_path / "model", "fp8", gain=1.0)
    out = tmp_path / "checkpoint"
    assert run(["convert", str(model.folder), "--out", str(out), "--verify", "--quiet"]) == 0
    assert (out / "config.json").is_file()
    capsys.readouterr()


def test_an_original_without_all_its_tensors_is_refused(asked: CheckSpec, tmp_path: Path) -> None:
    whole = write_tiny_model(tmp_path / "whole", "llama")
    checkpoint = convert_model(Model(path=whole), ConvertSpec(), out=tmp_path / "checkpoint").path
    tensors = read_safetensors(whole / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_safetensors(whole / "model.safetensors", tensors)
    with pytest.raises(CorruptFileError, match=r"lacks tensors .*layers\.1\.mlp\.up_proj\.weight"):
        check_checkpoint(checkpoint, whole, asked)


def scaled_wrongly(engine: Path) -> None:
    """All scales of one matrix are eight times what they are, in the engine alone."""
    import openvino as ov

    graph = ov.Core().read_model(engine / "rank0.xml")
    scales = [
        each
        for each in graph.get_ops()
        if each.get_type_name() == "Constant"
        and each.get_output_size() == 1
        and len(each.get_output_shape(0)) >= 2
        and [user.get_node().get_type_name() for user in each.output(0).get_target_inputs()] == ["Multiply"]
    ]
    assert scales
    wrong = ov.opset13.constant(scales[len(scales) // 2].data * 8)
    for user in scales[len(scales) // 2].output(0).get_target_inputs():
        user.replace_source_output(wrong.output(0))
    ov.save_model(graph, engine / "other.xml", compress_to_fp16=False)
    for kind in ("xml", "bin"):
        (engine / f"other.{kind}").replace(engine / f"rank0.{kind}")


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_wrong_scale_in_the_engine_is_found_beside_a_right_checkpoint(
    quantize: Literal["int8", "int4"], asked: CheckSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model", "llama", gain=1.0)
    spec = ConvertSpec(dtype="float32", quantize=quantize)
    checkpoint = convert_model(Model(path=model), spec)
    engine = build_engine(checkpoint, BuildSpec(runtime="openvino", max_seq_len=64, max_num_tokens=16)).path
    command = ["check", str(checkpoint.path), "--prompts", str(asked.prompts), "--max-tokens", "8", "--json"]
    assert run(command) == 0
    stages = json.loads(capsys.readouterr().out)["result"]["stages"]
    assert [(stage["stage"], stage["bounds"]) for stage in stages][1:] == [
        ("precision", quantize),
        ("engine", quantize),
    ]
    # The engine has the checkpoint's weights: only its arithmetic and cache differ.
    assert stages[2]["relative"] == pytest.approx(stages[1]["relative"], abs=0.05)
    assert check_engine(engine, model, asked).passed
    scaled_wrongly(engine)
    assert run(command) == 25
    found = json.loads(capsys.readouterr().out)["result"]["stages"]
    assert [all(verdict["passed"] for verdict in stage["verdicts"]) for stage in found] == [True, True, False]


def test_an_import_that_is_verified_leaves_no_wrong_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model", "llama", gain=1.0)
    command = ["import", str(model), "--name", "tiny", "--runtime", "openvino", "--quantize", "int8", "--verify"]
    command += ["--max-seq-len", "512"]
    right = converted.logits_of_engine
    monkeypatch.setattr(
        converted, "logits_of_engine", lambda *given, **named: [2 * each for each in right(*given, **named)]
    )
    assert run(command) == 25
    assert "build it again" in capsys.readouterr().err
    assert not list(Store().complete(Engine))
    monkeypatch.setattr(converted, "logits_of_engine", right)
    assert run(command) == 0
    assert "The engine matches the model (int8" in capsys.readouterr().err


def spoil_blocks(engine: Path) -> None:
    """The first 32 inputs of one matrix are eight times what they are, as a wrong scale of their blocks makes them."""
    import openvino as ov

    graph = ov.Core().read_model(engine / "rank0.xml")
    (matrix,) = (each for each in graph.get_ops() if each.get_friendly_name() == "transformer.layers.0.mlp.proj.weight")
    values = matrix.data.copy()
    values[..., :32] *= 8
    wrong = ov.opset13.constant(values)
    for user in matrix.output(0).get_target_inputs():
        user.replace_source_output(wrong.output(0))
    ov.save_model(graph, engine / "other.xml", compress_to_fp16=False)
    for kind in ("xml", "bin"):
        (engine / f"other.{kind}").replace(engine / f"rank0.{kind}")


def spoil_scales(engine: Path) -> None:
    """The scales of one FP8 matrix are eight times what they are; the checkpoint has a file of its own."""
    path = engine / "rank0.safetensors"
    tensors = read_any_safetensors(path)
    tensors["transformer.layers.0." + SCALES] = tensors["transformer.layers.0." + SCALES] * 8
    path.unlink()
    write_any_safetensors(path, tensors)


def published(form: str, folder: Path) -> Path:
    """Return a tiny model as it is published in a form."""
    if form == "fp8":
        return write_quantised_model(folder, "fp8, blocks of 128", gain=1.0).folder
    if form == "mxfp4":
        return pair(folder)[1]
    return write_gguf_model(folder, "llama", "llama", "Q8_0", gain=1.0, **SIZES)[0]


@pytest.mark.parametrize(
    ("form", "options", "spoil"),
    [
        ("fp8", ["--runtime", "torch", "--device", "cpu", "--keep-fp8"], spoil_scales),
        ("mxfp4", ["--runtime", "openvino", "--dtype", "float32"], spoil_blocks),
        ("gguf", ["--runtime", "openvino", "--dtype", "float32"], spoil_blocks),
    ],
)
def test_wrong_scales_of_a_published_form_are_found_in_its_engine(
    form: str,
    options: list[str],
    spoil: Callable[[Path], None],
    asked: CheckSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`import --verify` leaves no such engine, and `check ENGINE` finds one."""
    model = published(form, tmp_path)
    command = ["import", str(model), "--name", "tiny", "--max-seq-len", "128", "--verify", *options]
    right = parity.verify_engine

    def spoiled(engine: Engine, *given: Any, **named: Any) -> None:
        spoil(engine.path)
        right(engine, *given, **named)

    monkeypatch.setattr(parity, "verify_engine", spoiled)
    assert run(command) == 25
    assert "build it again" in capsys.readouterr().err
    assert not list(Store().complete(Engine))
    monkeypatch.setattr(parity, "verify_engine", right)
    assert run(command) == 0
    assert "The engine matches the model" in capsys.readouterr().err
    (engine,) = Store().complete(Engine)
    checked = ["check", str(engine.path), "--prompts", str(asked.prompts), "--max-tokens", "8"]
    assert run(checked) == 0
    spoil(engine.path)
    assert run(checked) == 25

"""`trtserve lora`: an adapter's folder becomes the two files of hf_lora_convert, once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.peft_adapters import PREFIX, write_adapter
from tests.support.tiny_models import read_safetensors
from trtserve.artifacts import Adapter, Manifest, looks_like
from trtserve.cli import run
from trtserve.errors import ConversionError, ModelNotFoundError, TrtserveError, UnsupportedModelError, UsageError
from trtserve.lora import build_options, convert_adapter, plan_adapter
from trtserve.progress import SilentProgress
from trtserve.store import Store

MODULES = {"self_attn.q_proj": (16, 16), "self_attn.v_proj": (16, 8), "mlp.down_proj": (24, 16)}


@dataclass
class Recorder(SilentProgress):
    """A Progress that remembers its warnings."""

    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "polite", modules=MODULES)


def by_hand(folder: Path, scale: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The layout of the reference, written out for this adapter: 2 layers of q (1), v (3) and down (6), rank 4."""
    tensors = read_safetensors(folder / "adapter_model.safetensors")
    weights, config = np.zeros((1, 6, 160), np.float16), np.zeros((1, 6, 3), np.int32)
    row = 0
    for layer in (0, 1):
        for module, number in (("self_attn.q_proj", 1), ("self_attn.v_proj", 3), ("mlp.down_proj", 6)):
            first = tensors[f"{PREFIX}.{layer}.{module}.lora_A.weight"].reshape(-1)
            second = (tensors[f"{PREFIX}.{layer}.{module}.lora_B.weight"] * np.float32(scale)).reshape(-1)
            weights[0, row, : first.size] = first
            weights[0, row, first.size : first.size + second.size] = second
            config[0, row] = number, layer, 4
            row += 1
    return weights, config


def test_the_files_are_what_the_reference_says(folder: Path) -> None:
    adapter = convert_adapter(folder)
    weights, config = by_hand(folder, 2.0)
    assert {path.name for path in adapter.path.iterdir()} == {
        "model.lora_weights.npy",
        "model.lora_config.npy",
        "manifest.json",
    }
    found = np.load(adapter.path / "model.lora_weights.npy")
    assert found.dtype == np.float16
    assert np.array_equal(found, weights)
    found = np.load(adapter.path / "model.lora_config.npy")
    assert found.dtype == np.int32
    assert np.array_equal(found, config)


def test_the_manifest(folder: Path) -> None:
    adapter = convert_adapter(str(folder), storage_type="float32", name="kind")
    manifest = Manifest.read(adapter.path)
    assert (manifest.kind, manifest.name) == ("adapter", "kind")
    assert manifest.facts["targets"] == ["attn_q", "attn_v", "mlp_4h_to_h"]
    assert (manifest.facts["rows"], manifest.facts["max_rank"], manifest.facts["base_model"]) == (6, 4, "tiny")
    assert build_options(adapter) == (
        "--lora-plugin auto --lora-target-modules attn_q,attn_v,mlp_4h_to_h --max-lora-rank 4"
    )
    assert np.load(adapter.path / "model.lora_weights.npy").dtype == np.float32


def test_equal_adapters_are_reused_by_content(folder: Path, tmp_path: Path) -> None:
    made = convert_adapter(folder, name="one")
    assert plan_adapter(write_adapter(tmp_path / "copy", modules=MODULES), name="one").reused
    assert not plan_adapter(folder, name="one", storage_type="float32").reused
    assert not plan_adapter(write_adapter(tmp_path / "other", modules=MODULES, seed=1), name="one").reused
    assert convert_adapter(folder, name="one").path == made.path


def test_it_is_found_by_name_and_by_folder(folder: Path) -> None:
    made = convert_adapter(folder)
    assert Store().find(Adapter, "polite").path == made.path
    assert Store().find(Adapter, str(made.path)).path == made.path
    assert looks_like(Adapter, made.path)
    assert not looks_like(Adapter, folder)


def test_names_without_a_module_are_told(tmp_path: Path) -> None:
    extra = {"base_model.model.lm_head.lora_A.weight": np.ones((4, 16), np.float32)}
    progress = Recorder()
    adapter = convert_adapter(write_adapter(tmp_path / "with-head", modules=MODULES, extra=extra), progress=progress)
    assert progress.warnings == [
        "No LoRA module of TensorRT-LLM matches, left out: base_model.model.lm_head.lora_A.weight"
    ]
    assert Manifest.read(adapter.path).facts["unmatched"] == list(extra)


def test_an_adapter_of_nothing_else_is_refused(tmp_path: Path) -> None:
    names = [f"base_model.model.transformer.h.{layer}.attn.c_attn.lora_A.weight" for layer in range(6)]
    extra = {name: np.ones((1, 1), np.float32) for name in names}
    folder = write_adapter(tmp_path / "gpt2", modules={}, extra=extra)
    with pytest.raises(UnsupportedModelError, match=r"No tensor of .*\.h\.3\.attn\.c_attn\.lora_A\.weight and 2 more"):
        convert_adapter(folder)
    assert not list(Store().folder(Adapter).glob("[!.]*"))


def test_no_half_artefact_is_left(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "large", modules=MODULES, lora_alpha=1e9)
    with pytest.raises(ConversionError, match="do not fit into float16"):
        convert_adapter(folder, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def refusal(folder: Path, error: type[TrtserveError]) -> str:
    with pytest.raises(error) as caught:
        plan_adapter(folder)
    return f"{caught.value.message} {caught.value.hint}"


def test_folders_that_are_no_adapters(tmp_path: Path, folder: Path) -> None:
    assert "adapter_config.json" in refusal(tmp_path, ModelNotFoundError)
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "elsewhere")
    assert "has no adapter_model.safetensors" in refusal(folder, UnsupportedModelError)
    (folder / "adapter_model.bin").touch()
    assert "takes PyTorch" in refusal(folder, UnsupportedModelError)


def test_wrong_values(folder: Path) -> None:
    with pytest.raises(UsageError, match="--storage-type is 'int8'"):
        plan_adapter(folder, storage_type="int8")
    with pytest.raises(ModelNotFoundError, match="demo is a model"):
        plan_adapter("demo")


def test_command(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(["lora", str(folder), "--out", str(out), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "modules   attn_q, attn_v, mlp_4h_to_h (6)" in text
    assert "made for tiny" in text
    assert not out.exists()
    assert run(["lora", str(folder), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{out}\n"
    assert "--lora-target-modules attn_q,attn_v,mlp_4h_to_h --max-lora-rank 4" in captured.err
    assert run(["lora", str(folder), "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert (result["reused"], result["max_rank"], result["rows"]) == (True, 4, 6)


def test_command_with_a_damaged_adapter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "adapter_config.json").write_text("{")
    assert run(["lora", str(folder)]) == 16
    assert "is not JSON" in capsys.readouterr().err

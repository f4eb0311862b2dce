"""Tensors that a conversion takes nothing from: stored twice, not in the index, not known; and --ignore-tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.recorded_progress import Lines
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import MANIFEST, Checkpoint, Model
from trtserve.cli import run
from trtserve.errors import ConversionError, UsageError
from trtserve.pipeline.convert import plan_conversion
from trtserve.specs import ConvertSpec


def convert(folder: Path, out: Path, **spec: Any) -> Checkpoint:
    return convert_model(Model(path=folder), ConvertSpec(**spec), out=out)


def weights(checkpoint: Checkpoint) -> dict[str, Any]:
    return read_safetensors(checkpoint.path / "rank0.safetensors")


def put(path: Path, **tensors: Any) -> None:
    """More tensors in a file, by their names with __ for each dot."""
    write_safetensors(path, read_safetensors(path) | {name.replace("__", "."): each for name, each in tensors.items()})


@pytest.mark.parametrize(
    "other", [np.zeros((320, 64), np.float32), np.zeros((320, 64), np.float16), np.zeros((64, 320), np.float32)]
)
def test_conflicting_duplicate_tensors_are_refused(tmp_path: Path, other: Any) -> None:
    folder = write_tiny_model(tmp_path / "hf", shards=2)
    put(folder / "model-00002-of-00002.safetensors", model__embed_tokens__weight=other)
    message = r"stores tensors twice with different values: model\.embed_tokens\.weight \(model-00001.*, model-00002"
    with pytest.raises(ConversionError, match=message):
        convert(folder, tmp_path / "out")


def test_duplicates_are_compared_to_the_last_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.checkpoint.source._PART", 1000)
    folder = write_tiny_model(tmp_path / "hf", shards=2)
    table = read_safetensors(folder / "model-00001-of-00002.safetensors")["model.embed_tokens.weight"].copy()
    expected = weights(convert(folder, tmp_path / "one"))
    put(folder / "model-00002-of-00002.safetensors", model__embed_tokens__weight=table)
    actual = weights(convert(folder, tmp_path / "two"))
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values)
    table[-1, -1] += 1
    put(folder / "model-00002-of-00002.safetensors", model__embed_tokens__weight=table)
    with pytest.raises(ConversionError, match="different values"):
        convert(folder, tmp_path / "three")


def test_unindexed_tensors_are_skipped_and_recorded(tmp_path: Path) -> None:
    """Unless the model needs them: transformers takes what it finds in the files."""
    folder = write_tiny_model(tmp_path / "hf", shards=2)
    expected = weights(convert(folder, tmp_path / "one"))
    second = folder / "model-00002-of-00002.safetensors"
    put(second, lora_a=np.zeros(3, np.float32), model__layers__0__surprise=np.ones((2, 2), np.float16))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].pop("lm_head.weight") == second.name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    lines = Lines()
    made = convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "two", progress=lines)
    actual = weights(made)
    assert actual.keys() == expected.keys()
    np.testing.assert_array_equal(actual["lm_head.weight"], expected["lm_head.weight"])
    left_out = ["lora_a", "model.layers.0.surprise"]
    assert json.loads((made.path / MANIFEST).read_text())["facts"]["left_out"] == left_out
    assert f"Left out of the checkpoint, as the model works without them: {', '.join(left_out)}" in lines.lines


def with_value_head(folder: Path) -> Path:
    """A model as reinforcement learning leaves it."""
    put(
        write_tiny_model(folder) / "model.safetensors",
        v_head__summary__weight=np.zeros((1, 64), np.float32),
        v_head__summary__bias=np.zeros(1, np.float32),
    )
    return folder


def test_ignored_tensors_are_skipped(tmp_path: Path) -> None:
    folder = with_value_head(tmp_path / "hf")
    with pytest.raises(ConversionError, match=r"\(2\): not known: v_head\.summary\.bias; not known: v_head") as caught:
        convert(folder, tmp_path / "out")
    assert "--ignore-tensors v_head.summary.bias (or a pattern)" in str(caught.value.hint)
    expected = weights(convert(write_tiny_model(tmp_path / "plain"), tmp_path / "one"))
    checkpoint = convert(folder, tmp_path / "out", ignore_tensors=("v_head.*",))
    actual = weights(checkpoint)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values)
    manifest = json.loads((checkpoint.path / MANIFEST).read_text())
    assert manifest["spec"]["ignore_tensors"] == ["v_head.*"]
    assert manifest["facts"]["left_out"] == ["v_head.summary.weight", "v_head.summary.bias"]


@pytest.mark.parametrize("pattern", ["v_haed.*", "lm_head.*", "model.*"])
def test_ignore_pattern_without_match_is_refused(tmp_path: Path, pattern: str) -> None:
    """What the model needs cannot be left out, and a typing error is not passed over."""
    folder = with_value_head(tmp_path / "hf")
    with pytest.raises(UsageError, match=r"matches no unused tensor \(unused tensors: v_head\.summary\.weight, "):
        convert(folder, tmp_path / "out", ignore_tensors=("v_head.*", pattern))
    plain = write_tiny_model(tmp_path / "plain")
    with pytest.raises(UsageError, match=r"matches no unused tensor \(all tensors are used\)"):
        convert(plain, tmp_path / "out", ignore_tensors=(pattern,))


def test_ignore_patterns_do_not_excuse_missing_tensors(tmp_path: Path) -> None:
    folder = with_value_head(tmp_path / "hf")
    tensors = {
        name: each for name, each in read_safetensors(folder / "model.safetensors").items() if "norm" not in name
    }
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ConversionError, match=r"missing: model\.norm\.weight") as caught:
        convert(folder, tmp_path / "out", ignore_tensors=("v_head.*",))
    assert "--ignore-tensors" not in str(caught.value.hint)


def test_ignore_tensors_is_refused_for_nvidia_tools(tmp_path: Path) -> None:
    spec = ConvertSpec(converter="upstream", ignore_tensors=("v_head.*",))
    with pytest.raises(UsageError, match="--ignore-tensors is for our own converter"):
        plan_conversion(Model(path=with_value_head(tmp_path / "hf")), spec)


def test_ignore_tensors_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = with_value_head(tmp_path / "hf"), tmp_path / "out"
    assert run(["plan", str(folder), "--quiet"]) == ConversionError.code
    assert "--ignore-tensors v_head.summary.bias" in capsys.readouterr().err
    assert run(["plan", str(folder), "--quiet", "--ignore-tensors", "v_head.*"]) == 0
    capsys.readouterr()
    patterns = ["--ignore-tensors", "v_head.summary.weight", "--ignore-tensors", "*.bias"]
    assert run(["convert", str(folder), "--out", str(out), "--json", "--quiet", *patterns]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert result["left_out"] == ["v_head.summary.weight", "v_head.summary.bias"]

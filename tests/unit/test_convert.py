"""Conversion: contents of every rank against independent shards, errors, reuse."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.families.shards import Tensors
from tests.support.recorded_progress import Lines
from tests.support.stages import convert_model
from tests.support.tiny_models import read_safetensors, write_safetensors, write_tiny_model
from trtserve.artifacts import MANIFEST, Checkpoint, Model
from trtserve.errors import (
    ConversionError,
    CorruptFileError,
    DiskSpaceError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from trtserve.pipeline.convert import plan_conversion
from trtserve.progress import SilentProgress, Task
from trtserve.specs import ConvertSpec, Quantization
from trtserve.store import NameRecord, Store


def convert(folder: Path, out: Path, **spec: Any) -> Checkpoint:
    return convert_model(Model(path=folder), ConvertSpec(**spec), out=out)


def read_ranks(folder: Path, count: int) -> list[Tensors]:
    assert sorted(path.name for path in folder.glob("*.safetensors")) == sorted(
        f"rank{rank}.safetensors" for rank in range(count)
    )
    return [read_safetensors(folder / f"rank{rank}.safetensors") for rank in range(count)]


@pytest.mark.parametrize(
    ("own", "expected"), [("float32", "float16"), ("bfloat16", "bfloat16"), ("float16", "float16"), (None, "float16")]
)
def test_dtype_auto_keeps_the_models_dtype_except_float32(tmp_path: Path, own: str | None, expected: str) -> None:
    folder = write_tiny_model(tmp_path / "hf", torch_dtype=own)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert plan_conversion(Model(path=folder), ConvertSpec()).work.spec.dtype == expected


@pytest.mark.parametrize(
    ("stored", "named", "told"),
    [
        ("float32", "float32", "float32: its weights become float16 (--dtype float32 keeps them)"),
        ("float16", "float16", None),
        ("bfloat16", "bfloat16", None),
        # Upstream takes float16 where config.json names no type; GPT-2's does not, and its files are float32.
        ("float32", None, "float32: its weights become float16 (--dtype float32 keeps them)"),
        ("bfloat16", None, "bfloat16: its weights become float16 (--dtype bfloat16 keeps them)"),
        ("float16", None, None),
        ("float32", "bfloat16", "float32: its weights become bfloat16 (--dtype float32 keeps them)"),
        ("float16", "float32", None),
    ],
)
def test_a_cast_of_the_weights_is_reported(stored: str, named: str | None, told: str | None, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", dtype=stored)
    config = json.loads((folder / "config.json").read_text())
    types = {"dtype": named, "torch_dtype": named} if named else {}
    kept = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(kept | types))
    lines = Lines()
    convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "auto", progress=lines)
    assert lines.lines == ([f"The model is {told}"] if told else [])
    convert_model(Model(path=folder), ConvertSpec(dtype="float16"), out=tmp_path / "asked", progress=lines)
    assert len(lines.lines) == int(told is not None)


def test_a_cast_from_several_types_names_the_type_that_keeps_all(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", dtype="bfloat16")
    tensors = read_safetensors(folder / "model.safetensors")
    norms = {name: each.astype(np.float16) for name, each in tensors.items() if "norm" in name}
    write_safetensors(folder / "model.safetensors", tensors | norms)
    lines = Lines()
    convert_model(Model(path=folder), ConvertSpec(), out=tmp_path / "out", progress=lines)
    words = "The model is bfloat16 and float16: its weights become bfloat16 (--dtype float32 keeps them)"
    assert lines.lines == [words]


@pytest.mark.parametrize(("quantize", "algorithm"), [("int8", "W8A16"), ("int4", "W4A16")])
def test_weight_only_quantisation_is_recorded_without_changing_weights(
    quantize: Quantization, algorithm: str, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    checkpoint = convert(folder, tmp_path / "out", quantize=quantize, dtype="float16")
    config = json.loads((checkpoint.path / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == algorithm
    assert {values.dtype.name for values in read_ranks(checkpoint.path, 1)[0].values()} == {"float16"}


@pytest.mark.parametrize("value", [70000.0, float("nan"), float("-inf")])
def test_a_float16_overflow_names_its_tensor(tmp_path: Path, value: float) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    tensors = {name: values.copy() for name, values in read_safetensors(folder / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = value
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ConversionError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .* 1 of \d+ numbers .* float16"):
        convert(folder, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_the_largest_float16_is_accepted(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    tensors = {name: values.copy() for name, values in read_safetensors(folder / "model.safetensors").items()}
    tensors["model.norm.weight"][0] = 65504.0
    write_safetensors(folder / "model.safetensors", tensors)
    out = read_ranks(convert(folder, tmp_path / "out", dtype="float16").path, 1)[0]
    assert out["transformer.ln_f.weight"][0] == 65504


def test_missing_and_unknown_tensors_are_listed_together(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    tensors = read_safetensors(folder / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.surprise"] = np.zeros(3, np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(ConversionError) as caught:
        convert(folder, tmp_path / "out")
    for text in (
        "(3)",
        "missing: model.norm.weight",
        "missing: model.layers.0.mlp.up_proj.weight",
        "not known: model.layers.0.surprise",
    ):
        assert text in caught.value.message


def test_a_wrong_shape_is_reported_with_both_shapes(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    with pytest.raises(ConversionError, match=r"embed_tokens\.weight is \[320, 64\], expected \[400, 64\]"):
        convert(folder, tmp_path / "out")


def test_known_unused_tensors_are_accepted(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf", "gpt2")
    tensors = read_safetensors(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): values for name, values in tensors.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)
    expected = read_ranks(convert(folder, tmp_path / "one", dtype="float32").path, 1)[0]
    write_safetensors(folder / "model.safetensors", bare)
    actual = read_ranks(convert(folder, tmp_path / "two", dtype="float32").path, 1)[0]
    assert actual.keys() == expected.keys()
    np.testing.assert_array_equal(actual["lm_head.weight"], expected["lm_head.weight"])


def test_a_truncated_file_names_its_tensor(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptFileError, match=r"model\.safetensors is damaged: tensor lm_head\.weight ends at byte"):
        convert(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("overrides", "tp", "message"),
    [
        ({}, 3, "4 attention heads do not divide by 3"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            2,
            "3 key/value heads do not divide by 2",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8},
            4,
            "3 key/value heads cannot be repeated evenly over 4 ranks",
        ),
        ({"intermediate_size": 126}, 4, "intermediate size 126 does not divide by 4"),
    ],
)
def test_indivisible_sizes_are_refused_with_numbers(
    tmp_path: Path, overrides: dict[str, Any], tp: int, message: str
) -> None:
    folder = write_tiny_model(tmp_path / "hf", **overrides)
    with pytest.raises(UsageError, match=message) as caught:
        convert(folder, tmp_path / "out", tp_size=tp)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Sizes that fit: 1")


def test_accepted_tensor_parallel_sizes(tmp_path: Path) -> None:
    """Heads of keys and values are repeated where there are more ranks."""
    folder = write_tiny_model(tmp_path / "hf", num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    with pytest.raises(UsageError) as caught:
        convert(folder, tmp_path / "out", tp_size=3)
    assert caught.value.hint == "Sizes that fit: 1, 2, 4, 8."


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has 2 layers") as caught:
        convert(write_tiny_model(tmp_path / "hf"), tmp_path / "out", pp_size=3)
    assert caught.value.hint == "Sizes that fit: 1 … 2."


def test_gpu_sm_without_4_bit_weights_is_reported(tmp_path: Path) -> None:
    lines = Lines()
    model = Model(path=write_tiny_model(tmp_path / "hf", dtype="bfloat16"))
    convert_model(model, ConvertSpec(gpu_sm=90), out=tmp_path / "out", progress=lines)
    assert [line.startswith("--gpu-sm makes no difference") for line in lines.lines] == [True]


def test_only_an_equal_conversion_is_reused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    first = convert(folder, tmp_path / "out", dtype="float16")
    written = (first.path / "rank0.safetensors").stat().st_mtime_ns
    assert convert(folder, tmp_path / "out").fingerprint == first.fingerprint  # auto is float16 here
    assert (first.path / "rank0.safetensors").stat().st_mtime_ns == written
    assert convert(folder, tmp_path / "out", tp_size=2).fingerprint != first.fingerprint
    assert len(read_ranks(tmp_path / "out", 2)) == 2


def test_a_full_disk_is_reported_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtserve.host.machine.free_disk", lambda path: 100_000)
    with pytest.raises(DiskSpaceError, match=r"would take .* free"):
        convert(write_tiny_model(tmp_path / "hf"), tmp_path / "store" / "out")
    assert list((tmp_path / "store").iterdir()) == []


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    class Interrupted(SilentProgress):
        @contextmanager
        def task(self, text: str, *, total: int, unit: str = "items", done: int = 0) -> Iterator[Task]:
            yield self

        def advance(self, amount: int) -> None:
            raise KeyboardInterrupt

        def describe(self, text: str) -> None:
            pass

    others = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        convert_model(
            Model(path=write_tiny_model(tmp_path / "hf")),
            ConvertSpec(tp_size=2),
            out=tmp_path / "store" / "out",
            progress=Interrupted(),
        )
    assert list((tmp_path / "store").iterdir()) == []
    assert threading.active_count() == others


def test_folders_without_a_model_are_refused_with_advice(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        convert(empty, tmp_path / "out")
    folder = write_tiny_model(tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="no weights"):
        convert(folder, tmp_path / "out")
    (folder / "model-00001.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"unsupported files: model-00001\.bin"):
        convert(folder, tmp_path / "out")


def test_missing_linked_weights_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    (folder / "model.safetensors").rename(tmp_path / "moved")
    (folder / "model.safetensors").symlink_to(tmp_path / "gone.safetensors")
    with pytest.raises(CorruptFileError, match=r"links to .*gone\.safetensors, which does not exist"):
        plan_conversion(Model(path=folder), ConvertSpec())


def test_an_imported_name_is_found(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    store = Store(tmp_path / "store")
    places: dict[str, Any] = {"model": str(folder), "checkpoint": "", "engine": "", "repository": ""}
    store.record(NameRecord(name="tiny", source="local", imported="2024-01-01", **places))
    assert store.find(Model, "tiny").path == folder
    with pytest.raises(ModelNotFoundError, match="neither a folder nor the name") as caught:
        store.find(Model, "tinny")
    assert caught.value.hint is not None
    assert caught.value.hint == "Did you mean tiny? To make one: trtserve import tinny"


def test_the_manifest_describes_the_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "hf")
    checkpoint = convert(folder, tmp_path / "out", tp_size=2)
    manifest = json.loads((checkpoint.path / MANIFEST).read_text())
    assert manifest["kind"] == "checkpoint"
    assert manifest["spec"] == {
        "tp_size": 2,
        "pp_size": 1,
        "moe_tp_size": None,
        "moe_ep_size": None,
        "dtype": "float16",
        "quantize": "none",
        "gpu_sm": 80,
    }
    assert manifest["facts"]["model"] == str(folder)
    sizes = [path.stat().st_size for path in checkpoint.path.glob("*.safetensors")]
    assert manifest["facts"]["bytes"] == sum(sizes)

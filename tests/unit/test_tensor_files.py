"""The safetensors reader: equal to the library on good files, exact about what is wrong with damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize

from tests.support.tiny_models import read_safetensors, write_tiny_model
from trtserve.checkpoint.source import read_source
from trtserve.checkpoint.tensor_files import TensorFile, layout
from trtserve.errors import CorruptFileError, UnsupportedModelError


def write(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: list[Any], code: str = "F32") -> dict[str, Any]:
    return {"dtype": code, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_equal_the_safetensors_library(tmp_path: Path, dtype: str) -> None:
    path = write_tiny_model(tmp_path, dtype=dtype) / "model.safetensors"
    file, expected = TensorFile(path), read_safetensors(path)
    assert file.entries.keys() == expected.keys()
    for name, values in expected.items():
        assert file.tensor(name).tobytes() == values.tobytes()
        assert file.tensor(name).dtype == values.dtype


def test_our_header_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    header, entries = layout({"a": (2, 3), "b": (4,)}, "float32")
    values = np.arange(10, dtype=np.float32)
    (tmp_path / "x.safetensors").write_bytes(header + values.tobytes())
    tensors = read_safetensors(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(tensors["a"], values[:6].reshape(2, 3))
    np.testing.assert_array_equal(tensors["b"], values[6:])
    assert len(header) % 8 == 0
    assert entries["b"].begin == len(header) + 24


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"x" * 20, b"", "header is not valid"),
        (b"[1, 2]", b"", "header is not valid"),
        ({"a": {"dtype": "F32"}}, b"", "header is not valid"),
        ({"a": entry(0, 8, [3])}, b"\0" * 8, r"tensor a has 64 bits; F32 \[3\] needs 96"),
        ({"a": entry(0, 16, [4])}, b"\0" * 8, "tensor a ends at byte"),
        ({"a": entry(4, 8, [1])}, b"\0" * 8, "tensor a begins at byte"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12, "tensor b begins at byte"),
        ({"a": entry(0, 8, [2])}, b"\0" * 12, "its header describes"),
        ({"a": entry(0, 4, [-1, -2], "F16")}, b"\0" * 4, "its header is not valid"),
        ({"a": entry(0, 4, ["1"])}, b"\0" * 4, "its header is not valid"),
        (b'{"a": 1, "b": 2, "a": 1}', b"\0" * 4, r"its header is not valid \(it names 'a' twice\)"),
        (b'{"a": {"dtype": "F32", "dtype": "I32"}}', b"\0" * 4, "it names 'dtype' twice"),
        ({"a": entry(0, 4, [True])}, b"\0" * 4, "its header is not valid"),
        ({"a": entry(0, 4, [4], "INT8")}, b"\0" * 4, "its header is not valid .*'INT8'"),
        ({"a": entry(0, 4, [7], "F4")}, b"\0" * 4, r"tensor a has 32 bits; F4 \[7\] needs 28"),
        ({"a": entry(0, 4, [(1 << 63) - 1] * 64)}, b"\0" * 4, "tensor a has 32 bits"),
        ({"a": entry(0, 4, [1 << 63, 0])}, b"\0" * 4, "its header is not valid"),
        ({"a": entry(0, 4, [1] * 100_000)}, b"\0" * 4, "a tensor of 100000 dimensions"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4, "its header is not valid"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}, b"\0" * 4, "its header is not valid"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        TensorFile(write(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"\0" * 5, struct.pack("<Q", 1 << 40) + b"{}"])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"x\.safetensors is damaged: its header claims"):
        TensorFile(tmp_path / "x.safetensors")


def test_a_header_that_takes_long_to_parse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="has 10000001 bytes; at most 10000000 are read"):
        TensorFile(write(tmp_path / "x.safetensors", b" " * 10_000_001, b""))


@pytest.mark.parametrize(("code", "count", "size"), [("F4", 8, 4), ("F6_E2M3", 4, 3), ("F8_E8M0", 4, 4), ("C64", 1, 8)])
def test_every_type_of_the_format_is_known(tmp_path: Path, code: str, count: int, size: int) -> None:
    path = write(tmp_path / "x.safetensors", {"a": entry(0, size, [count], code)}, b"\0" * size)
    assert TensorFile(path).entries["a"].size == size
    deserialize(path.read_bytes())  # type: ignore[no-untyped-call]  # raises what it refuses


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CorruptFileError, match="Git LFS pointer"):
        TensorFile(tmp_path / "x.safetensors")


def test_non_float_types_are_refused(tmp_path: Path) -> None:
    file = TensorFile(write(tmp_path / "x.safetensors", {"a": entry(0, 4, [4], "I8")}, b"\0" * 4))
    with pytest.raises(UnsupportedModelError, match="I8"):
        file.tensor("a")


def test_index_with_missing_files_or_tensors_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = content["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {"model.ghost": first}}))
    with pytest.raises(CorruptFileError, match=r"lacks tensors that .* lists for it: model\.ghost"):
        read_source(folder, "model.")
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {"model.ghost": "model-00003.safetensors"}}))
    with pytest.raises(CorruptFileError, match=r"model-00003\.safetensors is missing"):
        read_source(folder, "model.")
    unusable: list[Any] = [
        None,
        [],
        {},
        {"a": 3},
        {"a": "/etc/passwd"},
        {"a": "../x"},
        {"a": ""},
        {"a": "x\0"},
        {"a": "x" * 400},
    ]
    for places in unusable:
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CorruptFileError, match=r"is not a( valid)? weight index"):
            read_source(folder, "model.")
    for text in ("[]", "{", "[" * 100_000):
        index.write_text(text)
        with pytest.raises(CorruptFileError, match=r"is not (a )?JSON"):
            read_source(folder, "model.")


def test_single_file_takes_precedence_over_index(tmp_path: Path) -> None:
    """As in transformers: what was saved again whole is not shadowed by an older index."""
    folder = write_tiny_model(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.ghost": "gone"}}))
    assert "model.norm.weight" in read_source(folder, "model.")

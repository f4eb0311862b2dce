"""Files of users and strangers: whatever is in them, a refusal names the file instead of ending in a traceback."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import socket
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bench_records import answered, report_of
from trtserve.artifacts import Checksums, Manifest
from trtserve.bench.exports import write_result
from trtserve.bench.records import read_records
from trtserve.bench.report import REPORT, SAMPLES, read_report
from trtserve.bench.traffic import read_dataset, read_histogram, read_trace
from trtserve.checkpoint.source import read_hf_config, weight_map
from trtserve.checkpoint.tensor_files import TensorFile
from trtserve.checkpoint.unified import read_config
from trtserve.cli import run
from trtserve.client.request import read_adapter_table, read_token_ids
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import ArtifactError, CorruptFileError, RepositoryError, UsageError
from trtserve.executor.loaders import read_engine_config
from trtserve.files import read_json_object
from trtserve.pipeline.model_files import planned_files
from trtserve.pipeline.setup_file.reading import read_setup
from trtserve.programs.shared.arrays import read_array
from trtserve.programs.shared.lora_names import LoraNames
from trtserve.repository.check.rules import refusal
from trtserve.repository.config import read_config as read_model_config
from trtserve.repository.engines import read_engine
from trtserve.repository.served import read_model_yaml
from trtserve.repository.tokenizer import token_ids
from trtserve.store.hub import RemoteFile

DEEP = 50_000
CONTENTS = {
    "nothing": b"",
    "no text": b"\xff\xfe\x00\x01",
    "zero bytes": b"a,b\n1,\x002\n",
    "lists in lists": b"[" * DEEP,
    "objects in objects": b'{"a":' * DEEP,
    "flow mappings": b"{a: " * DEEP,
    "messages in messages": b"parameters {" * DEEP,
    "null": b"null",
    "number": b"7",
    "infinity": b'{"timestamp": 1e999, "input_length": 1e999, "output_length": 1e999, "prompt": [[1, 2, 1e999]]}',
    "long number": b"9" * 5000,
    "half a character": b'{"input": "\\ud800", "instruction": "", "output": ""}',
    "list of null": b"[null]",
    "object": b"{}",
    "wide cell": b"kind,from,to,count\nprompt," + b"7" * 200_000 + b",1,1\n",
    "short row": b"kind,from,to,count\nprompt\n",
    "other columns": b"TIMESTAMP,ContextTokens\nyesterday,many\n",
    "date": b"model: 2001-99-99",
    "anchor in itself": b"models: &a\n  x: *a\n",
    "header": (10**12).to_bytes(8, "little") + b"{}",
}


def in_folder(name: str, read: Callable[[Path], object]) -> Callable[[Path], object]:
    """Rename the file to `name`, which its reader looks for in a folder."""
    return lambda path: read(path.rename(path.with_name(name)).parent)


READERS: dict[str, Callable[[Path], object]] = {
    "setup file": read_setup,
    "trace": read_trace,
    "histogram": read_histogram,
    "dataset": read_dataset,
    "records": read_records,
    "token ids": lambda path: read_token_ids(str(path), "--input-tokens-csv"),
    "tokenizer": in_folder("tokenizer_config.json", lambda folder: TokenizerFiles(folder).special_tokens()),
    "vocabulary": in_folder("tokenizer.json", token_ids),
    "model": in_folder("config.json", read_hf_config),
    "weight index": weight_map,
    "weights": TensorFile,
    "checkpoint": in_folder("config.json", read_config),
    "engine": in_folder("config.json", read_engine),
    "engine of the server": in_folder("config.json", read_engine_config),
    "model.yaml": read_model_yaml,
    "config.pbtxt": read_model_config,
    "manifest": in_folder("manifest.json", Manifest.read),
    "any object": read_json_object,
}
# Files that a user names are read from pipes and devices too.
BY_USERS = ("trace", "histogram", "dataset", "token ids")


@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_read_or_refused(reader: str, tmp_path: Path) -> None:
    for number, content in enumerate(CONTENTS.values()):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / "a-file"
        path.write_bytes(content)
        error = refusal(partial(READERS[reader], path))
        if error is not None:
            assert str(tmp_path) in error.message or "--input-tokens-csv" in error.message, content[:40]
            assert len(error.message) < 2000, content[:40]


def header(descr: str = "'<f4'", shape: str = "(1, 2)") -> bytes:
    """The start of an .npy file."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def archive() -> bytes:
    with zipfile.ZipFile(content := io.BytesIO(), "w") as file:
        file.writestr("a.npy", header())
    return content.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        archive(),
        pickle.dumps([1.0]),
        header(),
        header(shape="(99999999999, 9999)"),
        header(shape=f"({10**30},)"),
        header(shape="(-1, -2)") + bytes(8),
        header(shape="(" * 1000),
        header(shape="('a', 2)"),
        header(descr="'|O'") + pickle.dumps([1.0]),
        header(descr="'<q9'"),
        header(descr="[[[[") + bytes(8),
        b"\x93NUMPY\x01\x00\x04\x00\x27\x27\x27\n",
        b"\x93NUMPY\x09\x00\x04\x00{}  ",
        b"\x93NUMPY\x01\x00\xff\xff{}",
    ],
)
def test_a_damaged_adapter_is_refused(content: bytes, tmp_path: Path) -> None:
    for name in ("weights", "config"):
        (tmp_path / f"model.lora_{name}.npy").write_bytes(content)
    (tmp_path / "lora.json").write_text(json.dumps({"adapters": {"poet": {"task_id": 1, "folder": "."}}}))
    with pytest.raises(ValueError, match=r"model\.lora_weights\.npy is not an \.npy file of plain numbers: "):
        read_array(tmp_path / "model.lora_weights.npy")
    with pytest.raises(ValueError, match=r"adapter poet cannot be read: .*model\.lora_weights\.npy is not an"):
        LoraNames(tmp_path).tensors("poet")


def test_sound_arrays_are_read(tmp_path: Path) -> None:
    sound: tuple[Any, ...] = (np.ones((2, 0)), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.float16(3))
    for number, values in enumerate(sound):
        np.save(tmp_path / f"{number}.npy", values)
        np.testing.assert_array_equal(read_array(tmp_path / f"{number}.npy"), values)


@pytest.mark.parametrize(
    "content", ["[" * DEEP, "null", "[]", "{}", '{"schema": SCHEMA}', '{"schema": SCHEMA, "spec": 1}']
)
def test_a_damaged_result_is_refused(content: str, tmp_path: Path) -> None:
    write_result(report_of([answered(0, intended=0.0)]), tmp_path)
    schema = json.loads((tmp_path / REPORT).read_text())["schema"]
    (tmp_path / REPORT).write_text(content.replace("SCHEMA", str(schema)))
    with pytest.raises(UsageError, match=str(tmp_path)):
        read_report(tmp_path)


def test_lines_of_samples_that_are_not_json_are_refused(tmp_path: Path) -> None:
    write_result(report_of([answered(0, intended=0.0)]), tmp_path)
    (tmp_path / SAMPLES).write_text("[" * DEEP)
    with pytest.raises(UsageError, match="damaged: its lists or objects are nested too deeply"):
        read_report(tmp_path)


def test_half_a_character_is_refused_before_it_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dataset").write_text('[{"prompt": "a"}, {"prompt": "a\\ud800"}]')
    with pytest.raises(UsageError, match=r"Entry 1 of .* has half a character"):
        read_dataset(tmp_path / "dataset")
    (tmp_path / "prompts").write_text('["a", "\\udfff"]')
    assert run(["query", "--input-file", str(tmp_path / "prompts")]) == UsageError.code
    assert "is a JSON list with " in capsys.readouterr().err
    (tmp_path / "dataset").write_text('[{"prompt": "\\ud83d\\ude00"}]')
    assert [example.prompt for example in read_dataset(tmp_path / "dataset")] == ["\U0001f600"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({}, "missing key `kind`"),
        ({"kind": "model", "name": 3, "fingerprint": "f"}, "expected `str`, got `int` at `name`"),
        ({"kind": "modul"}, "invalid enum value 'modul' at `kind`"),
        (
            {"kind": "model", "name": "m", "fingerprint": "f", "inputs": ["a"]},
            "expected `object`, got `array` at `inputs`",
        ),
        ({"kind": "model", "name": "m", "fingerprint": "f", "colour": "red"}, "unknown key `colour`"),
    ],
)
def test_a_refused_manifest_names_the_key_and_what_it_should_hold(
    content: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ArtifactError, match=re.escape(f"manifest.json cannot be read as a manifest: {reason}.")):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("size", [3 << 30, 17 << 20])
def test_the_error_about_a_huge_file_names_the_limit(size: int, tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as handle:
        handle.truncate(size)
    with pytest.raises(ArtifactError, match=r"config\.json is larger than 16 MiB: it is not read"):
        read_json_object(tmp_path / "config.json")


def test_a_huge_tokenizer_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    files = [
        RemoteFile(name=name, size=size, digest="") for name, size in (("config.json", 9), ("vocab.json", 1 << 40))
    ]
    with pytest.raises(CorruptFileError, match=r"vocab\.json of org/x has 1024\.0 GiB; .* up to 64 MiB"):
        planned_files("org/x", files, lambda file: pytest.fail(f"{file.name} is read"))


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


NO_FILES: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": bound,
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("reader", [name for name in READERS if name not in BY_USERS])
def test_what_is_no_file_is_not_read(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, make in NO_FILES.items():
        (tmp_path / kind).mkdir()
        monkeypatch.chdir(tmp_path / kind)  # the address of a socket is short
        make(Path("a-file"))
        found = refusal(partial(READERS[reader], tmp_path / kind / "a-file"))
        assert found is not None or reader == "vocabulary", kind


@pytest.mark.parametrize("name", ["/dev/zero", "../secret", "a/../../b", "", ".", "a\0b", "a" * 256, "a//b"])
def test_a_manifest_lists_files_below_its_folder_only(name: str, tmp_path: Path) -> None:
    content = {"kind": "repository", "name": "m", "fingerprint": "f", "files": {name: "0" * 64}}
    (tmp_path / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ArtifactError, match="is not the name of a file below its folder"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "facts",
    [
        {"members": [1]},
        {"members": {"a": "b"}},
        {"core_models": {"tensorrt_llm": "x"}},
        {"core_models": {"tensorrt_llm": {"engine": "a\0b"}}},
        {"core_models": {"tensorrt_llm": {"files": {"rank0.engine": -1}}}},
        {"limits": {"max_seq_len": "many"}},
        {"container_paths": ["/models"]},
        {"suffix": "a" * 5000},
        {"vocab_size": 10**40},
    ],
)
def test_facts_of_other_types_are_refused(facts: dict[str, Any], tmp_path: Path) -> None:
    content = {"kind": "repository", "name": "m", "fingerprint": "f", "facts": facts}
    (tmp_path / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ArtifactError, match="cannot be read as the facts of a manifest"):
        Manifest.read(tmp_path)


def test_a_checksum_of_a_device_is_not_computed(tmp_path: Path) -> None:
    (tmp_path / "weights").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    assert Checksums().of([tmp_path / "weights", tmp_path / "pipe"]) == {}


@pytest.mark.parametrize("folder", ["/etc", "../x", "a/../../x"])
def test_adapters_are_below_the_repository(folder: str, tmp_path: Path) -> None:
    (tmp_path / "lora.json").write_text(json.dumps({"adapters": {"poet": {"task_id": 1, "folder": folder}}}))
    with pytest.raises(ValueError, match="not below the repository"):
        LoraNames(tmp_path)
    with pytest.raises(RepositoryError, match="not a folder below the repository"):
        read_adapter_table(tmp_path / "lora.json")


@pytest.mark.parametrize("dtype", ["", "x", "float8", "a" * 5000, None])
def test_a_checkpoint_of_an_unknown_type_is_refused_by_name(dtype: str | None, tmp_path: Path) -> None:
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"), 4)
    content = {"architecture": "LlamaForCausalLM", **sizes, "dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CorruptFileError, match=r"(has dtype = .*|lacks dtype); expected float32, float16, bfloat16"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**content, "dtype": "float16"}))
    assert read_config(tmp_path).dtype == "float16"

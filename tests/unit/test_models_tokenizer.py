"""How the models load and use a tokenizer, which is data by an unknown author."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import write_byte_tokenizer, write_tiny_model
from trtserve.client.tokenizer import TokenizerFiles
from trtserve.errors import MissingDependencyError, RepositoryError, UnsupportedModelError, UsageError
from trtserve.pipeline.model import plan_model
from trtserve.programs.shared.tokenizer import (
    PREPARED,
    PreparedTokenizer,
    configured_end_ids,
    decode,
    encode,
    load_tokenizer,
    open_tokenizer,
    prepare,
    require_bounded,
)
from trtserve.repository.tokenizer import check_tokenizer


def with_parts(folder: Path, **parts: Any) -> Path:
    write_byte_tokenizer(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return folder


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(text: str) -> dict[str, Any]:
    table = (8).to_bytes(4, "little") + bytes(8) + text.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


_DOUBLED = replace({"Regex": ""}, "b")
_MANY = {"type": "Sequence", "normalizers": [_DOUBLED] * 100_000}
_NESTED = _DOUBLED
for _ in range(400):
    _NESTED = {"type": "Sequence", "normalizers": [_NESTED]}


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer_dir is .*nowhere, which is not a folder"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": replace({"String": "a"}, "b" * 1000)}, "normalizer may make 1000 characters of one"),
        ({"normalizer": {"type": "Prepend", "prepend": "b" * 1000}}, "normalizer may make 1000 characters of one"),
        ({"normalizer": {"type": "Sequence", "normalizers": [_DOUBLED] * 5}}, "normalizer may make 32 characters"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [_DOUBLED] * 100_000}},
            "normalizer may make 32 characters",
        ),
        ({"normalizer": charsmap("b" * 1000)}, "normalizer may make 1000 characters of one; at most 16 are allowed"),
        ({"decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "b" * 99)]}}, "decoder may make 99"),
        ({"added_tokens": [{"id": 1, "content": "a"}] * 131_073}, "131073 added tokens; at most 131072 are allowed"),
    ],
)
def test_a_tokenizer_that_makes_too_much_is_refused_before_it_is_loaded(
    tmp_path: Path, parts: dict[str, Any], words: str
) -> None:
    folder = with_parts(tmp_path, **parts)
    with pytest.raises(ValueError, match=words):
        load_tokenizer(folder)
    with pytest.raises(UsageError, match=words):
        _ = TokenizerFiles(folder).tokenizer
    with pytest.raises(RepositoryError, match=words):
        check_tokenizer(folder, None)
    tokenizer = (folder / "tokenizer.json").read_text()
    write_tiny_model(folder)
    (folder / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(UnsupportedModelError, match=words):
        plan_model(str(folder))


def test_large_files_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ValueError, match=r"tokenizer\.json has 65 MiB; at most 64 MiB are allowed"):
        require_bounded(tmp_path)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [charsmap("x" * 18), replace({"Regex": " {2,}"}, "▁")]}},
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")],
            },
            "decoder": {"type": "Sequence", "decoders": [replace({"String": "▁"}, " "), {"type": "Fuse"}]},
        },
        {"normalizer": None, "decoder": None},
        {"normalizer": {"type": "NFKC"}},
    ],
)
def test_parts_of_published_tokenizers_are_taken(tmp_path: Path, parts: dict[str, Any]) -> None:
    require_bounded(with_parts(tmp_path, **parts))


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Replace", "pattern": 5, "content": ["x"]}},
        {"normalizer": {"type": "Prepend", "prepend": 7}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": {}}},
        {"decoder": {"type": "Sequence", "decoders": 5}},
        {"decoder": {"type": "Replace", "pattern": {"String": 1}, "content": " "}},
        {"added_tokens": 5},
        {"normalizer": _NESTED},
    ],
)
def test_parts_of_wrong_types_are_an_error(tmp_path: Path, parts: dict[str, Any]) -> None:
    folder = with_parts(tmp_path, **parts)
    with pytest.raises(ValueError, match=r"\w"):
        open_tokenizer(folder)
    with pytest.raises(RepositoryError, match="cannot be loaded"):
        check_tokenizer(folder, None)


@pytest.mark.parametrize("ends", [[10**12], "x", [1, "a"], 1.5])
def test_end_ids_that_no_model_can_have_are_refused_before_a_server_starts(tmp_path: Path, ends: object) -> None:
    folder = with_parts(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(RepositoryError, match="has the eos_token_id"):
        check_tokenizer(folder, None)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ([2, 3, 2], [2, 3]),
        (-1, []),
        (2**31, None),
        (10**30, None),
        (list(range(1025)), None),
        (2.0, None),
        (True, None),
    ],
)
def test_ids_that_end_an_answer(tmp_path: Path, given: object, ids: list[int] | None) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    if ids is None:
        with pytest.raises(ValueError, match="expected an id or a list of at most 1024 ids"):
            configured_end_ids(tmp_path)
    else:
        assert configured_end_ids(tmp_path) == ids


def test_a_tokenizer_that_panics_is_an_error(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    folder = with_parts(tmp_path, pre_tokenizer=split)
    tokenizer = open_tokenizer(folder)
    with pytest.raises(ValueError, match=r"cannot encode this text: .*retry-limit"):
        encode(tokenizer, "a" * 40 + "b", special=False)
    with pytest.raises(UsageError, match=r"cannot encode this text: .*retry-limit"):
        TokenizerFiles(folder).encode("a" * 40 + "b", special=True)
    with pytest.raises(ValueError, match="cannot decode these tokens"):
        decode(tokenizer, [-1], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("content", "kind", "package"),
    [
        (b"\n\x0e\n\x05<unk>", "a SentencePiece model", "sentencepiece"),
        (b"IQ== 0\n", "a tiktoken vocabulary", "tiktoken"),
    ],
)
def test_packages_that_a_tokenizer_needs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, kind: str, package: str
) -> None:
    monkeypatch.setattr("trtserve.programs.shared.tokenizer.find_spec", lambda name: None if name == package else name)
    folder = write_tiny_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(content)
    words = f"tokenizer.model is {kind}, which needs the package {package}"
    for load in (
        lambda: TokenizerFiles(folder).tokenizer,
        lambda: check_tokenizer(folder, None),
        lambda: plan_model(str(folder)),
    ):
        with pytest.raises(MissingDependencyError, match=words) as caught:
            load()
        assert f"pip install {package}" in str(caught.value.hint)


def prepared_folder(folder: Path, **parts: Any) -> Path:
    write_tiny_model(with_parts(folder, **parts))
    check_tokenizer(folder, None, keep=True)
    return folder


def test_a_prepared_tokenizer_does_what_transformers_does(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path)
    made = open_tokenizer(folder)
    assert isinstance(made, PreparedTokenizer)
    (folder / PREPARED).unlink()
    original = open_tokenizer(folder)
    assert not isinstance(original, PreparedTokenizer)
    for text in ("", "Hello, wörld!", " two  spaces ", "".join(original.all_special_tokens), "\0\n🙂"):
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special)
            assert made.encode(text, add_special_tokens=special) == ids
            assert made.decode(ids, skip_special_tokens=special) == original.decode(ids, skip_special_tokens=special)
            assert made.convert_ids_to_tokens(ids) == original.convert_ids_to_tokens(ids)
        offsets = [
            each(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            for each in (made, original)
        ]
        assert offsets[0] == offsets[1]
    for name in ("eos_token_id", "pad_token_id", "special_tokens_map", "is_fast"):
        assert getattr(made, name) == getattr(original, name), name
    assert set(made.all_special_ids) == set(original.all_special_ids)
    assert made.get_vocab() == original.get_vocab()
    assert len(made) == len(original)
    for token in ("a", "<nothing>"):
        assert made.convert_tokens_to_ids(token) == original.convert_tokens_to_ids(token), token


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_prepared_tokenizer_is_left_when_its_files_have_changed(tmp_path: Path, name: str) -> None:
    folder = prepared_folder(tmp_path)
    path = folder / name
    path.write_text(path.read_text() + " ")
    assert not isinstance(open_tokenizer(folder), PreparedTokenizer)


def test_a_prepared_tokenizer_is_bounded_like_any_other(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path)
    content = json.loads((folder / PREPARED).read_text())
    made = json.loads(content["tokenizer"]) | {"normalizer": replace({"String": "a"}, "b" * 1000)}
    (folder / PREPARED).write_text(json.dumps(content | {"tokenizer": json.dumps(made)}))
    with pytest.raises(ValueError, match="normalizer may make 1000 characters of one"):
        open_tokenizer(folder)
    (folder / PREPARED).write_text(json.dumps(content | {"tokenizer": "{}"}))
    with pytest.raises(ValueError, match="its prepared form"):
        open_tokenizer(folder)


def test_a_tokenizer_that_does_more_than_the_library_is_not_prepared(tmp_path: Path) -> None:
    folder = tmp_path
    write_byte_tokenizer(folder)
    tokenizer = open_tokenizer(folder)
    tokenizer.split_special_tokens = tokenizer.backend_tokenizer.encode_special_tokens = True
    prepare(tokenizer, folder)

    class Own(type(tokenizer)):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **options: Any) -> str:
            return str(super()._decode(*arguments, **options)).upper()

    own = open_tokenizer(folder)
    own.__class__ = Own
    prepare(own, folder)
    assert not (folder / PREPARED).exists()

"""What a spec asks for, in the words of the command line: only what is not so by itself."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec

S = TypeVar("S", ConvertSpec, BuildSpec, RepositorySpec)

# Fields of the specs that hold a path.
_PATHS = frozenset({"trtllm_examples"})
# Options that are not spelled as their field: when the field is true, and when it is false.
_SWITCHES = {
    "streaming": ("--streaming", "--no-streaming"),
    "enable_kv_cache_reuse": ("--enable-kv-cache-reuse", "--disable-kv-cache-reuse"),
    "enable_chunked_context": ("--enable-chunked-context", "--disable-chunked-context"),
    "exclude_input_in_output": ("--exclude-input-in-output", "--include-input-in-output"),
    "accumulate_tokens": ("--accumulate-tokens", "--no-accumulate-tokens"),
}
# Options that are given once for every part of their field.
_REPEATED = {
    "ignore_tensors": "--ignore-tensors",
    "converter_flags": "--converter-flag",
    "container_flags": "--container-flag",
    "builder_flags": "--builder-flag",
    "settings": "--set",
    "lora": "--lora",
}
# Folders of an import's record, and their options.
_FOLDERS = {"tokenizer": "tokenizer", "draft": "draft_engine", "out": "out", "into": "into"}

PLACE = ("runtime", "trtllm_version", "container", "container_flags", "build_workers")
"""Fields of BuildSpec that say where and with what an engine is built, not what it is like."""


def wishes(spec: ConvertSpec | BuildSpec | RepositorySpec, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Field → value of what `spec` does not leave to its default, in the types of JSON; a name is none of it."""
    found = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name not in without}
    defaults = {field.name: _default(field) for field in fields(spec)}
    return {name: _plain(value) for name, value in found.items() if name != "name" and value != defaults[name]}


def spec_of(kind: type[S], content: Mapping[str, Any]) -> S:
    """A spec of what JSON kept of it; fields that a newer version dropped are passed over, new ones have defaults."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: _typed(name, value) for name, value in content.items() if name in known})


def option_words(wished: Mapping[str, Any]) -> list[str]:
    """The options that ask for this (field → value), each as a shell takes it."""
    return [word for name, value in wished.items() for word in _words(name, value)]


def import_command(name: str, source: str, asked: Mapping[str, Any], *, without: Collection[str] = ()) -> str:
    """`trtserve import` under `name` of what was `asked` (an import's record), but for the fields `without`.

    `source` is what was typed, for records of older versions, which do not have the rest.
    """
    words = ["trtserve import", shlex.quote(str(asked.get("source") or source)), "--name", shlex.quote(name)]
    if not asked:
        return " ".join([*words, "(and its flags)"])
    wished: dict[str, Any] = {}
    wished |= wishes(spec_of(ConvertSpec, asked["convert"]), without=without)
    wished |= wishes(spec_of(BuildSpec, asked["build"]), without=without)
    wished |= wishes(spec_of(RepositorySpec, asked["repository"]), without=without)
    wished |= {option: asked[key] for key, option in _FOLDERS.items() if asked.get(key) is not None}
    return " ".join([*words, *option_words(wished)])


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.expanduser().absolute())
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _typed(name: str, value: Any) -> Any:
    """JSON has neither tuples nor paths."""
    if name == "lora":
        return {adapter: Path(folder) for adapter, folder in value.items()}
    if name in _PATHS and value is not None:
        return Path(value)
    return tuple(value) if isinstance(value, list) else value


def _words(name: str, value: Any) -> Iterator[str]:
    if name in _REPEATED:
        sign = " " if isinstance(value, Mapping) else "="  # what is handed on begins with a dash itself
        yield from (f"{_REPEATED[name]}{sign}{shlex.quote(part)}" for part in _parts(value))
    elif isinstance(value, bool):
        yield _SWITCHES[name][0 if value else 1] if name in _SWITCHES else _option(name)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield f"{_option(name)} {shlex.quote(','.join(value))}"
    else:
        yield f"{_option(name)} {shlex.quote(str(value))}"


def _parts(value: Any) -> list[str]:
    return [f"{key}={text}" for key, text in value.items()] if isinstance(value, Mapping) else list(value)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

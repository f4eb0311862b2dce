"""Convert specs to command lines, and saved records back to specs."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trtserve.specs import BuildSpec, ConvertSpec, RepositorySpec
from trtserve.specs.options import Option, Spec, options_of

S = TypeVar("S", bound=Spec)

# Paths in the record of an import, and their options.
_FOLDERS = {"tokenizer": "tokenizer", "draft": "draft_engine", "out": "out", "into": "into"}

PLACE = ("runtime", "trtllm_version", "container", "container_flags", "build_workers")
"""Fields of BuildSpec that say where and with what an engine is built, not what it is like."""


def given_values(spec: Spec, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return field → value, in the types of JSON, of all fields that differ from their default; a name is left out."""
    found = {name: (option, getattr(spec, name)) for name, option in options_of(type(spec)).items()}
    return {
        name: _plain(value)
        for name, (option, value) in found.items()
        if value != option.default and name != "name" and name not in without
    }


def spec_of(kind: type[S], content: Mapping[str, Any]) -> S:
    """Return the spec with those of the options that it has, such as those of a record; the others get their default.

    A path may be a text, and a tuple any sequence.
    """
    options = options_of(kind)
    return kind(**{name: options[name].from_json(value) for name, value in content.items() if name in options})


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Return the options that set these values (field → value), quoted for a shell."""
    return [word for name, value in values.items() for word in _words(name, value, _options().get(name))]


def spec_arguments(spec: Spec) -> list[str]:
    """Return the command-line arguments that give these options, except for its name and its API key."""
    options = options_of(type(spec))
    given = given_values(spec, without=("api_key",))
    words = (word for name, value in given.items() for word in _words(name, value, options[name]))
    return [argument for word in words for argument in shlex.split(word)]


def import_command(name: str, source: str, asked: Mapping[str, Any], *, without: Collection[str] = ()) -> str:
    """Return the `trtserve import` that makes `name` as the record `asked` says, except for the fields `without`.

    `source` is what the user typed; records of older versions have nothing else.
    """
    words = ["trtserve import", shlex.quote(str(asked.get("source") or source)), "--name", shlex.quote(name)]
    if not asked:
        return " ".join([*words, "(and its flags)"])
    values: dict[str, Any] = {}
    values |= given_values(spec_of(ConvertSpec, asked["convert"]), without=without)
    values |= given_values(spec_of(BuildSpec, asked["build"]), without=without)
    values |= given_values(spec_of(RepositorySpec, asked["repository"]), without=without)
    values |= {option: asked[key] for key, option in _FOLDERS.items() if asked.get(key) is not None}
    return " ".join([*words, *option_words(values)])


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.expanduser().absolute())
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


@functools.cache
def _options() -> Mapping[str, Option]:
    return {**options_of(ConvertSpec), **options_of(BuildSpec), **options_of(RepositorySpec)}


def _words(name: str, value: Any, option: Option | None) -> Iterator[str]:
    if option is None:
        yield f"--{name.replace('_', '-')} {shlex.quote(str(value))}"
    elif option.type is bool:
        yield option.flag if value else option.off_flags[0]
    elif option.split:
        yield f"{option.flag} {shlex.quote(','.join(map(str, value)))}"
    elif option.container == "dict":
        yield from (f"{option.flag} {shlex.quote(f'{key}={each}')}" for key, each in value.items())
    elif option.container == "tuple":  # a flag that is passed on starts with a dash itself
        yield from (f"{option.flag}={shlex.quote(each)}" for each in value)
    else:
        yield f"{option.flag} {shlex.quote(str(value))}"

"""The parameters of the Triton models: their values, and how the embedded executor treats them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from trtserve.nvidia.releases import Row
from trtserve.repository.tables import load_model, read_releases

Kind = Literal["bool", "int", "float", "words", "path", "list", "text"]

CLASSES_FILE = "parameter_classes.json"
"""File next to a model's program: the parameters that it ignores or refuses."""

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_TREE = re.compile(r"\{[0-9]+(, *[0-9]+)*\}(, *\{[0-9]+(, *[0-9]+)*\})*")  # NVIDIA's own guide has blanks in it
_DEVICES = re.compile(r"[0-9]+(,[0-9]+)*(;[0-9]+(,[0-9]+)*)*")
_YES_NO = ("true", "1", "t", "y", "yes", "false", "0", "f", "n", "no")
_BOUNDED = re.compile(r"(integers?) >= (\d+)(?:, neutral (\d+))?")


@dataclass(frozen=True)
class Values:
    """The texts that a parameter takes, in every runtime."""

    kind: Kind
    expected: str
    """The values in words, for error messages."""
    accepts: Callable[[str], bool]
    """Whether a text is one of them. Texts that NVIDIA's backend would ignore with a warning are not."""
    choices: tuple[str, ...] = ()
    """Values of which a runtime may support fewer: the words of an enumeration, or the neutral number."""


@dataclass(frozen=True, kw_only=True)
class OpenvinoSupport:
    """How the embedded executor treats a parameter."""

    kind: Literal["effective", "ignored", "refused"] = "effective"
    """`ignored` values change nothing, so that one repository serves a laptop and a GPU; `refused` ones would change
    results, so the model does not load."""
    why: str = ""
    """Why it is ignored or refused."""
    refused_values: tuple[str, ...] = ()
    """The values that are refused; empty: every value."""
    accepted_values: tuple[str, ...] = ()
    """Values that are not refused, because they ask for nothing."""
    differs: str = ""
    """How accepted values differ from TensorRT-LLM."""


@dataclass(frozen=True, kw_only=True)
class Parameter(Row):
    """One parameter of a Triton model."""

    name: str
    values: Values
    meaning: str
    default: str = ""
    """What no value means, in words."""
    unset: str = ""
    """The text in config.pbtxt when nothing is set."""
    support: OpenvinoSupport = OpenvinoSupport()
    required: bool = False
    """Whether it must have a value."""
    needs_key: bool = False
    """Whether NVIDIA's C++ backend needs the key, even without a value."""


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """A variable of NVIDIA's templates that fills a field of config.pbtxt instead of a parameter."""

    name: str
    meaning: str
    kind: Kind = "int"
    types: tuple[str, ...] = ()
    """Triton data types (without TYPE_) that it takes, if it is a data type."""
    flag: str = ""
    """The option that sets it; empty: `--set`."""


@cache
def parameters_of(model: str) -> tuple[Parameter, ...]:
    """Return every parameter of `model` in any release, in the order of config.pbtxt."""
    return tuple(_parameter(entry) for entry in load_model(model).get("parameters", ()))


@cache
def added_parameters(model: str) -> tuple[Parameter, ...]:
    """Return the parameters of `model` that no release has: trtserve's own program reads them."""
    return tuple(_parameter(entry) for entry in load_model(model).get("added_parameters", ()))


@cache
def config_fields() -> tuple[ConfigField, ...]:
    """Return the variables of NVIDIA's templates that are not parameters."""
    fields = []
    for entry in load_model("tensorrt_llm")["fields"]:
        values, own = entry["values"], {key: text for key, text in entry.items() if key != "values"}
        if isinstance(values, list):
            fields.append(ConfigField(kind="words", types=tuple(values), **own))
        else:
            fields.append(ConfigField(kind="bool" if values == "bool" else "int", **own))
    return tuple(fields)


def find_parameter(model: str, name: str, release: str) -> Parameter | None:
    """Return the parameter `name` of `model` in `release`, or trtserve's own, or None when there is none."""
    rows = (*parameters_of(model), *added_parameters(model))
    return next((each for each in rows if each.name == name and each.within(release)), None)


def parameter_classes(model: str, release: str) -> dict[str, Any]:
    """Return the content of CLASSES_FILE: the parameters of `model` that the embedded executor ignores or refuses.

    {"ignored": {name: {"why", "unset"}}, "refused": {name: {"why", "values", "accepted"}}}; `unset` is the text that
    means no value, empty `values` mean every value except the `accepted` ones.
    """
    rows = [row for row in parameters_of(model) if row.within(release)]
    return {
        "ignored": {
            row.name: {"why": row.support.why, "unset": row.unset} for row in rows if row.support.kind == "ignored"
        },
        "refused": {
            row.name: {
                "why": row.support.why,
                "values": row.support.refused_values,
                "accepted": row.support.accepted_values,
            }
            for row in rows
            if row.support.kind == "refused"
        },
    }


def classes_json(model: str, release: str) -> str | None:
    """Return the text of CLASSES_FILE for `model`, or None when all its parameters are effective."""
    content = parameter_classes(model, release)
    return json.dumps(content, indent=2) + "\n" if any(content.values()) else None


def ignored_settings(model: str, given: Mapping[str, str], release: str) -> list[str]:
    """Return the names in `given` (parameter → text) that have a value and that the embedded executor ignores."""
    classes = parameter_classes(model, release)["ignored"]
    return [name for name, entry in classes.items() if given.get(name, "").strip() not in ("", entry["unset"])]


def _parameter(entry: Mapping[str, Any]) -> Parameter:
    since, until = read_releases(entry.get("releases", "all"))
    kind = next((kind for kind in ("ignored", "refused") if kind in entry), "effective")
    support = OpenvinoSupport(
        kind=kind,  # type: ignore[arg-type]  # one of the three words
        why=entry.get(kind, ""),
        refused_values=tuple(entry.get("refused_values", ())),
        accepted_values=tuple(entry.get("accepted_values", ())),
        differs=entry.get("differs", ""),
    )
    own = {key: entry[key] for key in ("name", "meaning", "default", "unset", "required", "needs_key") if key in entry}
    return Parameter(since=since, until=until, values=values_of(entry["values"]), support=support, **own)


def values_of(text: str | Sequence[str]) -> Values:
    """Read the `values` of a parameter in the tables: a list of words, or text such as `integer >= 1, neutral 1`."""
    if not isinstance(text, str):
        return _one_of(*text)
    if bounded := _BOUNDED.fullmatch(text):
        return _integers(int(bounded[2]), several=bounded[1] == "integers", neutral=bounded[3])
    return {
        "number in (0, 1]": _share(zero=False),
        "number in [0, 1]": _share(zero=True),
        "path": Values("path", "any path", lambda _: True),
        "text": Values("text", "any text", lambda _: True),
        # The words that the C++ backend and the Python core model read alike.
        "switch": replace(
            _one_of("true", "false", "True", "False", "TRUE", "FALSE", "1", "0"), kind="bool", choices=("true", "false")
        ),
        "yes-no": Values("bool", f"one of {', '.join(_YES_NO)}", lambda word: word.lower() in _YES_NO),
        "tree": Values("list", "a tree such as {0},{0,0},{1}", lambda tree: _TREE.fullmatch(tree) is not None),
        "devices": Values(
            "list",
            "numbers such as 0,1, or 0,1;2,3 for two instances",
            lambda devices: _DEVICES.fullmatch(devices) is not None,
        ),
    }[text]


def _one_of(*words: str) -> Values:
    return Values("words", f"one of {', '.join(words)}", lambda text: text in words, words)


def _integers(least: int, *, several: bool, neutral: str | None) -> Values:
    def accepts(text: str) -> bool:
        parts = text.split(",") if several else [text]
        return all(part.isascii() and part.isdigit() and int(part) >= least for part in parts)

    if several:
        return Values("list", f"whole numbers of {least} or more, separated by commas", accepts)
    return Values("int", f"a whole number of {least} or more", accepts, () if neutral is None else (neutral,))


def _share(*, zero: bool) -> Values:
    return Values(
        "float",
        f"a number in {'[' if zero else '('}0, 1]",
        lambda text: _NUMBER.fullmatch(text) is not None and 0 <= float(text) <= 1 and (zero or float(text) > 0),
    )

"""Tensors, ensemble steps and parameters of the Triton models in each TensorRT-LLM release, read from the tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from trtserve.errors import RepositoryError, UsageError
from trtserve.files import decode_as, optional_json_object, whole_number
from trtserve.nvidia.releases import NEWEST, Row, normalize_release, order
from trtserve.repository.tables import load_model, read_releases, rows_of

Kind = Literal["bool", "int", "float", "words", "path", "list", "text"]

CLASSES_FILE = "parameter_classes.json"  # file next to a model's program: the parameters that it ignores or refuses

_NUMBER = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_TREE = re.compile(r"\{[0-9]+(, *[0-9]+)*\}(, *\{[0-9]+(, *[0-9]+)*\})*")  # NVIDIA's own guide has blanks in it
_DEVICES = re.compile(r"[0-9]+(,[0-9]+)*(;[0-9]+(,[0-9]+)*)*")
_YES_NO = ("true", "1", "t", "y", "yes", "false", "0", "f", "n", "no")
_BOUNDED = re.compile(r"(integers?) >= (\d+)(?:, neutral (\d+))?")


@dataclass(frozen=True)
class Values:
    """The texts that a parameter takes, in every runtime."""

    kind: Kind
    expected: str  # the values in words, for error messages
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
    why: str = ""  # why it is ignored or refused
    refused_values: tuple[str, ...] = ()  # the values that are refused; empty: every value
    accepted_values: tuple[str, ...] = ()  # values that are not refused, because they ask for nothing
    differs: str = ""  # how accepted values differ from TensorRT-LLM


@dataclass(frozen=True, kw_only=True)
class Parameter(Row):
    """One parameter of a Triton model."""

    name: str
    values: Values
    meaning: str
    default: str = ""  # what no value means, in words
    unset: str = ""  # the text in config.pbtxt when nothing is set
    support: OpenvinoSupport = OpenvinoSupport()
    required: bool = False  # whether it must have a value
    needs_key: bool = False  # whether NVIDIA's C++ backend needs the key, even without a value


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """A variable of NVIDIA's templates that fills a field of config.pbtxt instead of a parameter."""

    name: str
    meaning: str
    kind: Kind = "int"
    types: tuple[str, ...] = ()  # Triton data types (without TYPE_) that it takes, if it is a data type
    flag: str = ""  # the option that sets it; empty: `--set`


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


def read_classes(folder: Path) -> Mapping[str, Any]:
    """Return the content of CLASSES_FILE in the version folder of a model, or empty without the file."""
    file = folder / CLASSES_FILE
    content = optional_json_object(file, RepositoryError)
    decode_as(content, _Classes, "the classes of parameters", file, RepositoryError, tolerant=True)
    return content


@dataclass(frozen=True, kw_only=True)
class _Refused:
    accepted: list[str]
    values: list[str] | None
    why: str


@dataclass(frozen=True, kw_only=True)
class _Ignored:
    unset: str


@dataclass(frozen=True, kw_only=True)
class _Classes:
    refused: dict[str, _Refused] = field(default_factory=dict)
    ignored: dict[str, _Ignored] = field(default_factory=dict)


def refused_parameter(parameters: Mapping[str, str], classes: Mapping[str, Any]) -> str | None:
    """Return why a model refuses one of `parameters` at load, or None when it accepts all.

    `classes` is the content of its CLASSES_FILE.
    """
    from trtserve.programs.shared.parameters import refusal

    entries = classes.get("refused", {}).items()
    reasons = (refusal(name, parameters.get(name, "").strip() or None, entry) for name, entry in entries)
    return next((str(reason) for reason in reasons if reason is not None), None)


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
        return all((number := whole_number(part)) is not None and number >= least for part in parts)

    if several:
        return Values("list", f"whole numbers of {least} or more, separated by commas", accepts)
    return Values("int", f"a whole number of {least} or more", accepts, () if neutral is None else (neutral,))


def _share(*, zero: bool) -> Values:
    return Values(
        "float",
        f"a number in {'[' if zero else '('}0, 1]",
        lambda text: _NUMBER.fullmatch(text) is not None and 0 <= float(text) <= 1 and (zero or float(text) > 0),
    )


CORE = "tensorrt_llm"
DRAFT = "tensorrt_llm_draft"  # a second core model, in repositories for speculative decoding

BLS = "tensorrt_llm_bls"
ENSEMBLE = "ensemble"
PREPROCESSING = "preprocessing"
POSTPROCESSING = "postprocessing"
LLMAPI_SINCE = "0.19"  # the first release with a model for the LLM API

MODELS = (PREPROCESSING, CORE, POSTPROCESSING, ENSEMBLE, BLS)


@dataclass(frozen=True, kw_only=True)
class TensorSpec(Row):
    """One input or output of a model."""

    name: str
    type: str  # Triton's type without the TYPE_ prefix, or a name such as `$logits` for one that the repository chooses
    dims: tuple[int, ...]  # without the batch axis; -1 is variable
    optional: bool = False
    scalar: bool = False  # `reshape { }`: the model sees [batch] where the client sends [batch, 1]
    ragged: bool = False


@dataclass(frozen=True, kw_only=True)
class Link(Row):
    """One line of the input or output map of an ensemble step."""

    name: str  # TensorSpec of the step's model
    ensemble_tensor: str


@dataclass(frozen=True, kw_only=True)
class EnsembleStep:
    model: str
    inputs: tuple[Link, ...]
    outputs: tuple[Link, ...]


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Tensors, parameters and (for the ensemble) steps of one model."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: tuple[Parameter, ...] = ()
    steps: tuple[EnsembleStep, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The five models of one release, or of all releases together."""

    release: str  # the release whose outputs, parameters and executor keywords are used
    union: bool  # whether the inputs are those of all releases, so that clients of each of them work
    models: Mapping[str, ModelProfile]


def profile(release: str | None = None) -> Profile:
    """Return the five models in `release`; None: with the inputs of all releases and the outputs of the newest."""
    return _profile(None if release is None else normalize_release(release))


def llmapi_model(release: str, *, own: bool = True) -> ModelProfile:
    """Return the model of the LLM API, with the inputs and outputs that trtserve adds if `own`, else as NVIDIA has it.

    Releases newer than the tables have the tensors of the newest. Raises UsageError for one without such a model.
    """
    chosen = NEWEST if order(release) > order(NEWEST) else normalize_release(release)
    if order(chosen) < order(LLMAPI_SINCE):
        raise UsageError(
            f"Release {chosen} has no model for the LLM API; {LLMAPI_SINCE} was the first.",
            hint="Serve an engine of that release, or name the newer one that is installed: --trtllm-version",
        )
    table = load_model("llmapi")
    inputs, outputs = (table[side] + (table[f"added_{side}"] if own else "") for side in ("inputs", "outputs"))
    return ModelProfile(
        name=CORE, inputs=_of_release(_tensors(inputs), chosen), outputs=_of_release(_tensors(outputs), chosen)
    )


@cache
def _profile(release: str | None) -> Profile:
    union, chosen = release is None, release or NEWEST
    models = {}
    for name in MODELS:
        table = load_model(name)
        rows = _tensors(_side(table, "inputs", union=union))
        models[name] = ModelProfile(
            name=name,
            inputs=_of_all(rows) if union else _of_release(rows, chosen),
            outputs=_of_release(_tensors(_side(table, "outputs", union=union)), chosen),
            parameters=_of_release(parameters_of(name), chosen),
            steps=_steps(table["steps"], chosen, union=union) if name == ENSEMBLE else (),
        )
    return Profile(release=chosen, union=union, models=models)


R = TypeVar("R", TensorSpec, Parameter, Link)


def _of_release(rows: Iterable[R], release: str) -> tuple[R, ...]:
    return tuple(row for row in rows if row.within(release))


# Release 0.12 sent the prompt table through preprocessing, as FP16; later releases send it to the core model directly,
# in a type that is chosen. An ensemble tensor has one type, so the union has the later way only.
_REPLACED = frozenset({"PROMPT_EMBEDDING_TABLE"})


def _of_all(rows: Sequence[R]) -> tuple[R, ...]:
    """Return the last form of every row, in table order, without what was replaced."""
    newest = {row.name: row for row in rows if row.name not in _REPLACED}
    return tuple(row for row in rows if newest.get(row.name) is row)


def _side(table: Mapping[str, str], side: str, *, union: bool) -> str:
    """Return the lines of `side` (inputs or outputs); `union` adds those that no release has."""
    return table[side] + (table.get(f"added_{side}", "") if union else "")


def _tensors(table: str) -> list[TensorSpec]:
    tensors = []
    for name, kind, dims, flags, releases in rows_of(table):
        since, until = read_releases(releases)
        tensors.append(
            TensorSpec(
                name=name,
                type=kind,
                dims=tuple(int(size) for size in dims.split(",")),
                optional="optional" in flags,
                scalar="scalar" in flags,
                ragged="ragged" in flags,
                since=since,
                until=until,
            )
        )
    return tensors


def _links(table: str) -> list[Link]:
    links = []
    for name, ensemble_tensor, releases in rows_of(table):
        since, until = read_releases(releases)
        links.append(Link(name=name, ensemble_tensor=ensemble_tensor, since=since, until=until))
    return links


def _steps(tables: Mapping[str, Mapping[str, str]], release: str, *, union: bool) -> tuple[EnsembleStep, ...]:
    known = {row.name for row in _tensors(_side(load_model(ENSEMBLE), "inputs", union=union))}
    steps = []
    for name, table in tables.items():
        outputs = _of_release(_links(_side(table, "outputs", union=union)), release)
        links = _links(_side(table, "inputs", union=union))
        # An old input whose source tensor only an old release produces cannot be part of the union.
        available = [link for link in links if link.ensemble_tensor in known]
        steps.append(
            EnsembleStep(
                model=name, inputs=_of_all(available) if union else _of_release(links, release), outputs=outputs
            )
        )
        known |= {link.ensemble_tensor for link in outputs}
    return tuple(steps)

"""Which tensors, ensemble steps and parameters the five Triton models have in each TensorRT-LLM release."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from trtserve.errors import UsageError
from trtserve.nvidia.releases import (
    NEWEST,
    Row,
    normalize_release,
    order,
)
from trtserve.repository.parameters import Parameter, parameters_of
from trtserve.repository.tables import load_model, read_releases, rows_of

CORE = "tensorrt_llm"
DRAFT = "tensorrt_llm_draft"
"""A second core model, in repositories for speculative decoding."""

BLS = "tensorrt_llm_bls"
ENSEMBLE = "ensemble"
PREPROCESSING = "preprocessing"
POSTPROCESSING = "postprocessing"
LLMAPI_SINCE = "0.19"
"""The first release with a model for the LLM API."""

MODELS = (PREPROCESSING, CORE, POSTPROCESSING, ENSEMBLE, BLS)


@dataclass(frozen=True, kw_only=True)
class Tensor(Row):
    """One input or output of a model."""

    name: str
    type: str
    """Triton's type without the TYPE_ prefix, or a name such as `$logits` for one that the repository chooses."""
    dims: tuple[int, ...]
    """Without the batch axis; -1 is variable."""
    optional: bool = False
    scalar: bool = False
    """`reshape { }`: the model sees [batch] where the client sends [batch, 1]."""
    ragged: bool = False


@dataclass(frozen=True, kw_only=True)
class Link(Row):
    """One line of the input or output map of an ensemble step."""

    name: str
    """Tensor of the step's model."""
    ensemble_tensor: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the ensemble."""

    model: str
    inputs: tuple[Link, ...]
    outputs: tuple[Link, ...]


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Tensors, parameters and (for the ensemble) steps of one model."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...] = ()
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The five models of one release, or of all releases together."""

    release: str
    """The release whose outputs, parameters and executor keywords are used."""
    union: bool
    """Whether the inputs are those of all releases, so that clients of each of them work."""
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


R = TypeVar("R", Tensor, Parameter, Link)


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


def _tensors(table: str) -> list[Tensor]:
    tensors = []
    for name, kind, dims, flags, releases in rows_of(table):
        since, until = read_releases(releases)
        tensors.append(
            Tensor(
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


def _steps(tables: Mapping[str, Mapping[str, str]], release: str, *, union: bool) -> tuple[Step, ...]:
    known = {row.name for row in _tensors(_side(load_model(ENSEMBLE), "inputs", union=union))}
    steps = []
    for name, table in tables.items():
        outputs = _of_release(_links(_side(table, "outputs", union=union)), release)
        links = _links(_side(table, "inputs", union=union))
        # An old input whose source tensor only an old release produces cannot be part of the union.
        available = [link for link in links if link.ensemble_tensor in known]
        steps.append(
            Step(model=name, inputs=_of_all(available) if union else _of_release(links, release), outputs=outputs)
        )
        known |= {link.ensemble_tensor for link in outputs}
    return tuple(steps)

"""Which tensors, ensemble steps and parameters the five Triton models have in each TensorRT-LLM release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trtserve.errors import UsageError
from trtserve.triton.tables import bls, core, ensemble, processing

RELEASES = ("0.12", "0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19", "0.20", "0.21", "1.0", "1.1", "1.2")
NEWEST = RELEASES[-1]

CORE = "tensorrt_llm"
BLS = "tensorrt_llm_bls"
ENSEMBLE = "ensemble"
PREPROCESSING = "preprocessing"
POSTPROCESSING = "postprocessing"
MODELS = (PREPROCESSING, CORE, POSTPROCESSING, ENSEMBLE, BLS)


def _order(release: str) -> tuple[int, int]:
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Something that exists from release `since` to release `until` (None: still there)."""

    since: str
    until: str | None = None

    def within(self, release: str) -> bool:
        """Whether the row is part of `release`."""
        return _order(self.since) <= _order(release) and (self.until is None or _order(release) <= _order(self.until))

    @property
    def supported(self) -> bool:
        """Whether any release of RELEASES has the row."""
        return self.until is None or _order(self.until) >= _order(RELEASES[0])


@dataclass(frozen=True, kw_only=True)
class Tensor(Row):
    """One input or output; `type` without the TYPE_ prefix, `dims` without the batch axis, -1 = variable.

    `scalar` means `reshape { }`: the model sees [batch] where the client sends [batch, 1].
    """

    name: str
    type: str
    dims: tuple[int, ...]
    optional: bool = False
    scalar: bool = False
    ragged: bool = False


@dataclass(frozen=True, kw_only=True)
class Parameter(Row):
    """One `parameters` entry; `text` is its value when nothing is set, empty for unset."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Link(Row):
    """One line of an ensemble step's map: `name` of the model's tensor, `ensemble_tensor` of the ensemble."""

    name: str
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
    """The five models as one release has them.

    `release` is the release whose outputs, parameters and executor keywords are used. `union` is set when the
    inputs are those of all releases, so that clients of each of them work.
    """

    release: str
    union: bool
    models: dict[str, ModelProfile]


def _tensors(table: str) -> list[Tensor]:
    tensors = []
    for line in table.strip().splitlines():
        name, kind, dims, flags, since, *until = line.split()
        tensors.append(
            Tensor(
                name=name,
                type=kind,
                dims=tuple(int(size) for size in dims.split(",")),
                optional="optional" in flags,
                scalar="scalar" in flags,
                ragged="ragged" in flags,
                since=since,
                until=until[0] if until else None,
            )
        )
    return tensors


def _parameters(table: str) -> list[Parameter]:
    parameters = []
    for line in table.strip().splitlines():
        name, text, since, *until = line.split()
        value = "" if text == "-" else text
        parameters.append(Parameter(name=name, text=value, since=since, until=until[0] if until else None))
    return parameters


def _links(table: str) -> list[Link]:
    links = []
    for line in table.strip().splitlines():
        name, ensemble_tensor, since, *until = line.split()
        links.append(Link(name=name, ensemble_tensor=ensemble_tensor, since=since, until=until[0] if until else None))
    return links


R = TypeVar("R", Tensor, Parameter, Link)


def _of_release(rows: Iterable[R], release: str) -> tuple[R, ...]:
    return tuple(row for row in rows if row.within(release))


# Release 0.12 sent the prompt table through preprocessing, as FP16; later ones hand it to the core model themselves, in
# a type that is chosen. An ensemble tensor has one type, so the union has the later way only.
_REPLACED = frozenset({"PROMPT_EMBEDDING_TABLE"})


def _of_all(rows: Sequence[R]) -> tuple[R, ...]:
    """The newest form of every row that any supported release has, in table order, without what was replaced."""
    newest = {row.name: row for row in rows if row.supported and row.name not in _REPLACED}
    return tuple(row for row in rows if newest.get(row.name) is row)


def normalize_release(text: str) -> str:
    """`0.18.2` → `0.18`; UsageError for a release that the table does not cover."""
    release = ".".join(text.strip().removeprefix("v").split(".")[:2])
    if release not in RELEASES:
        raise UsageError(
            f"--release is {text!r}; the table covers {RELEASES[0]} … {NEWEST}.",
            hint=f"Use one of {', '.join(RELEASES)}.",
        )
    return release


def profile(release: str | None = None) -> Profile:
    """The five models in `release`; None: the inputs of all releases together with the outputs of the newest."""
    union = release is None
    chosen = NEWEST if release is None else normalize_release(release)

    def inputs(table: str) -> tuple[Tensor, ...]:
        rows = _tensors(table)
        return _of_all(rows) if union else _of_release(rows, chosen)

    def model(name: str, in_table: str, out_table: str, parameters: str = "", **more: tuple[Step, ...]) -> ModelProfile:
        return ModelProfile(
            name=name,
            inputs=inputs(in_table),
            outputs=_of_release(_tensors(out_table), chosen),
            parameters=_of_release(_parameters(parameters), chosen),
            **more,
        )

    models = (
        model(
            PREPROCESSING,
            processing.PREPROCESSING_INPUTS,
            processing.PREPROCESSING_OUTPUTS,
            processing.PREPROCESSING_PARAMETERS,
        ),
        model(CORE, core.INPUTS, core.OUTPUTS, core.PARAMETERS),
        model(
            POSTPROCESSING,
            processing.POSTPROCESSING_INPUTS,
            processing.POSTPROCESSING_OUTPUTS,
            processing.POSTPROCESSING_PARAMETERS,
        ),
        model(ENSEMBLE, ensemble.INPUTS, ensemble.OUTPUTS, steps=_steps(chosen, union=union)),
        model(BLS, bls.INPUTS, bls.OUTPUTS, bls.PARAMETERS),
    )
    return Profile(release=chosen, union=union, models={each.name: each for each in models})


def _steps(release: str, *, union: bool) -> tuple[Step, ...]:
    tables = (
        (PREPROCESSING, ensemble.PREPROCESSING_INPUT_MAP, ensemble.PREPROCESSING_OUTPUT_MAP),
        (CORE, ensemble.CORE_INPUT_MAP, ensemble.CORE_OUTPUT_MAP),
        (POSTPROCESSING, ensemble.POSTPROCESSING_INPUT_MAP, ensemble.POSTPROCESSING_OUTPUT_MAP),
    )
    known = {row.name for row in _tensors(ensemble.INPUTS)}
    steps = []
    for name, input_table, output_table in tables:
        outputs = _of_release(_links(output_table), release)
        links = _links(input_table)
        # An old input whose source tensor only an old release produces cannot be part of the union.
        inputs = (
            _of_all([link for link in links if link.ensemble_tensor in known]) if union else _of_release(links, release)
        )
        steps.append(Step(model=name, inputs=inputs, outputs=outputs))
        known |= {link.ensemble_tensor for link in outputs}
    return tuple(steps)

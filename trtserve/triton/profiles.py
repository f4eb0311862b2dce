"""Which tensors, ensemble steps and parameters the five Triton models have in each TensorRT-LLM release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from trtserve.errors import UsageError
from trtserve.releases import NEWEST, RELEASES, Row, normalize_release, order
from trtserve.triton.tables import bls, core, ensemble, llmapi, parameters, processing
from trtserve.triton.tables.rows import Parameter

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
    for line in filter(None, table.splitlines()):
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


def _links(table: str) -> list[Link]:
    links = []
    for line in filter(None, table.splitlines()):
        name, ensemble_tensor, since, *until = line.split()
        links.append(Link(name=name, ensemble_tensor=ensemble_tensor, since=since, until=until[0] if until else None))
    return links


R = TypeVar("R", Tensor, Parameter, Link)


def _supported(row: Row) -> bool:
    """Whether any release of RELEASES has the row."""
    return row.until is None or order(row.until) >= order(RELEASES[0])


def _of_release(rows: Iterable[R], release: str) -> tuple[R, ...]:
    return tuple(row for row in rows if row.within(release))


# Release 0.12 sent the prompt table through preprocessing, as FP16; later ones hand it to the core model themselves, in
# a type that is chosen. An ensemble tensor has one type, so the union has the later way only.
_REPLACED = frozenset({"PROMPT_EMBEDDING_TABLE"})


def _of_all(rows: Sequence[R]) -> tuple[R, ...]:
    """The last form of every row that any supported release has, in table order, without what was replaced."""
    newest = {row.name: row for row in rows if _supported(row) and row.name not in _REPLACED}
    return tuple(row for row in rows if newest.get(row.name) is row)


def profile(release: str | None = None) -> Profile:
    """The five models in `release`; None: the inputs of all releases together with the outputs of the newest."""
    union = release is None
    chosen = NEWEST if release is None else normalize_release(release)

    def inputs(table: str) -> tuple[Tensor, ...]:
        rows = _tensors(table)
        return _of_all(rows) if union else _of_release(rows, chosen)

    def model(name: str, tables: ModelTables, **more: tuple[Step, ...]) -> ModelProfile:
        if union:
            tables = tables.of_union()
        return ModelProfile(
            name=name,
            inputs=inputs(tables.inputs),
            outputs=_of_release(_tensors(tables.outputs), chosen),
            parameters=_of_release(tables.parameters, chosen),
            **more,
        )

    models = [
        model(name, tables, **({"steps": _steps(chosen, union=union)} if name == ENSEMBLE else {}))
        for name, tables in _TABLES.items()
    ]
    return Profile(release=chosen, union=union, models={each.name: each for each in models})


@dataclass(frozen=True, kw_only=True)
class ModelTables:
    """The tables of one model; `union_…` are added for the union of all releases."""

    inputs: str
    outputs: str
    parameters: tuple[Parameter, ...] = ()
    union_inputs: str = ""
    union_outputs: str = ""

    def of_union(self) -> ModelTables:
        """The same tables with what only the union has."""
        return replace(self, inputs=self.inputs + self.union_inputs, outputs=self.outputs + self.union_outputs)


_TABLES = {
    PREPROCESSING: ModelTables(
        inputs=processing.PREPROCESSING_INPUTS,
        outputs=processing.PREPROCESSING_OUTPUTS,
        parameters=parameters.PREPROCESSING,
        union_inputs=processing.UNION_PREPROCESSING_INPUTS,
        union_outputs=processing.UNION_PREPROCESSING_OUTPUTS,
    ),
    CORE: ModelTables(
        inputs=core.INPUTS,
        outputs=core.OUTPUTS,
        parameters=parameters.CORE,
        union_inputs=core.UNION_INPUTS,
        union_outputs=core.UNION_OUTPUTS,
    ),
    POSTPROCESSING: ModelTables(
        inputs=processing.POSTPROCESSING_INPUTS,
        outputs=processing.POSTPROCESSING_OUTPUTS,
        parameters=parameters.POSTPROCESSING,
    ),
    ENSEMBLE: ModelTables(
        inputs=ensemble.INPUTS,
        outputs=ensemble.OUTPUTS,
        union_inputs=ensemble.UNION_INPUTS,
        union_outputs=ensemble.UNION_OUTPUTS,
    ),
    BLS: ModelTables(
        inputs=bls.INPUTS,
        outputs=bls.OUTPUTS,
        parameters=parameters.BLS,
        union_inputs=bls.UNION_INPUTS,
        union_outputs=bls.UNION_OUTPUTS,
    ),
}
_MAPS = (
    ModelTables(
        inputs=ensemble.PREPROCESSING_INPUT_MAP,
        outputs=ensemble.PREPROCESSING_OUTPUT_MAP,
        union_inputs=ensemble.UNION_PREPROCESSING_INPUT_MAP,
        union_outputs=ensemble.UNION_PREPROCESSING_OUTPUT_MAP,
    ),
    ModelTables(
        inputs=ensemble.CORE_INPUT_MAP,
        outputs=ensemble.CORE_OUTPUT_MAP,
        union_inputs=ensemble.UNION_CORE_INPUT_MAP,
        union_outputs=ensemble.UNION_CORE_OUTPUT_MAP,
    ),
    ModelTables(inputs=ensemble.POSTPROCESSING_INPUT_MAP, outputs=ensemble.POSTPROCESSING_OUTPUT_MAP),
)


def llmapi_model(release: str, *, own: bool = True) -> ModelProfile:
    """The model of the LLM API, with trtserve's `own` tensors or as NVIDIA has it.

    Releases after the newest of the tables have its tensors; UsageError for one that has no such model.
    """
    chosen = NEWEST if order(release) > order(NEWEST) else normalize_release(release)
    if order(chosen) < order(LLMAPI_SINCE):
        raise UsageError(
            f"Release {chosen} has no model for the LLM API; {LLMAPI_SINCE} was the first.",
            hint="Serve an engine of that release, or name the newer one that is installed: --trtllm-version",
        )
    inputs = llmapi.INPUTS + (llmapi.OWN_INPUTS if own else "")
    outputs = llmapi.OUTPUTS + (llmapi.OWN_OUTPUTS if own else "")
    return ModelProfile(
        name=CORE, inputs=_of_release(_tensors(inputs), chosen), outputs=_of_release(_tensors(outputs), chosen)
    )


def _steps(release: str, *, union: bool) -> tuple[Step, ...]:
    ends = _TABLES[ENSEMBLE].of_union() if union else _TABLES[ENSEMBLE]
    known = {row.name for row in _tensors(ends.inputs)}
    steps = []
    for name, map_tables in zip((PREPROCESSING, CORE, POSTPROCESSING), _MAPS, strict=True):
        tables = map_tables.of_union() if union else map_tables
        outputs = _of_release(_links(tables.outputs), release)
        links = _links(tables.inputs)
        # An old input whose source tensor only an old release produces cannot be part of the union.
        inputs = (
            _of_all([link for link in links if link.ensemble_tensor in known]) if union else _of_release(links, release)
        )
        steps.append(Step(model=name, inputs=inputs, outputs=outputs))
        known |= {link.ensemble_tensor for link in outputs}
    return tuple(steps)

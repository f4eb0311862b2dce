"""The models that have an alias, and in which precision this machine can serve them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trtserve.errors import MemoryLimitError, TrtserveError, UsageError
from trtserve.executor.runtimes import CPU_RUNTIME, automatic_runtime
from trtserve.host.machine import available_memory
from trtserve.pipeline.estimate import Question, plan_needs, require_fit
from trtserve.pipeline.known_models import KnownModel, known_models
from trtserve.specs import BuildSpec, ConvertSpec

Fit = Literal["yes", "int8", "int4", "no"]
# What to convert to, and its size compared with the original's.
_PRECISIONS: tuple[tuple[Literal["none", "int8", "int4"], Fit, float], ...] = (
    ("none", "yes", 1.0),
    ("int8", "int8", 0.5),
    ("int4", "int4", 0.25),
)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One model of the list."""

    alias: str
    repository: str  # hub id
    parameters: int
    source_bytes: int
    licence: str
    gated: bool
    fits: Fit | None  # the first precision that this machine can serve; None where that is unknown


def list_known() -> Iterator[Listed]:
    """Yield every model that has an alias."""
    known: dict[str, Fit | None] = {}
    for model in known_models():
        shape = repr(sorted(model.config.items()))  # several models differ in their weights alone
        if shape not in known:
            known[shape] = _fit(model)
        yield Listed(
            alias=model.alias,
            repository=model.repository,
            parameters=model.parameters,
            source_bytes=model.source_bytes,
            licence=model.licence,
            gated=model.gated,
            fits=known[shape],
        )


def _fit(model: KnownModel) -> Fit | None:
    # Weights beyond the memory need no estimate, which would search long for what fits.
    limit = available_memory().free if automatic_runtime()[0] == CPU_RUNTIME else None
    for quantize, fit, size in _PRECISIONS:
        if limit is not None and model.source_bytes * size > limit:
            continue
        try:
            require_fit(plan_needs(model.alias, Question(convert=ConvertSpec(quantize=quantize), build=BuildSpec())))
        except MemoryLimitError:
            continue
        except UsageError:  # a GPU that nothing is known about
            return None
        except TrtserveError:
            return "no"
        return fit
    return "no"

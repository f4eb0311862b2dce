"""Rules about ensembles: what Triton itself asks of the steps and their tensors, and of their batches."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trtserve.check.repository.findings import Fault
from trtserve.check.repository.subject import ModelFolder, Subject
from trtserve.triton.config import type_name
from trtserve.triton.profiles import ENSEMBLE


@dataclass(frozen=True, kw_only=True)
class _End:
    """One end of an ensemble tensor: a tensor of a model, or of the ensemble itself, and whether it is made there."""

    model: ModelFolder
    tensor: Any
    makes: bool

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.tensor.dims)

    @property
    def full(self) -> tuple[int, ...]:
        return ((-1,) if self.model.config.max_batch_size > 0 else ()) + self.dims


def absent_steps(subject: Subject) -> Iterator[Fault]:
    """Every step names a model."""
    for ensemble in subject.of(ENSEMBLE):
        if not ensemble.config.ensemble_scheduling.step:
            yield _fault(ensemble, "It has no step.", "Take over the steps of NVIDIA's template.")
        for name in {step.model_name for step in ensemble.config.ensemble_scheduling.step}:
            if name not in subject.models and name not in subject.unread:
                close = difflib.get_close_matches(name, subject.models, n=1)
                yield _fault(
                    ensemble,
                    f"A step names the model {name!r}, which is not in the repository.",
                    f"Did you mean {close[0]}?" if close else f"It has: {', '.join(sorted(subject.models))}.",
                )


def unknown_ends(subject: Subject) -> Iterator[Fault]:
    """Every name in a map is a tensor of the step's model."""
    for ensemble in subject.of(ENSEMBLE):
        for model, mapped, declared in _maps(subject, ensemble):
            for name in sorted(set(mapped) - set(declared)):
                yield _fault(
                    ensemble,
                    f"The step {model.name} maps {name}, and that model declares no such tensor.",
                    "Declare it there, or leave the line out of the map.",
                )


def unmapped_inputs(subject: Subject) -> Iterator[Fault]:
    """Every input that a step needs is mapped."""
    for ensemble in subject.of(ENSEMBLE):
        for step, model in _steps(subject, ensemble):
            for tensor in model.config.input:
                if not tensor.optional and tensor.name not in step.input_map:
                    yield _fault(
                        ensemble,
                        f"The step {model.name} needs the input {tensor.name}, and nothing is mapped to it.",
                        "Map a tensor to it, or mark it optional in that model.",
                    )


def without_source(subject: Subject) -> Iterator[Fault]:
    """Every tensor that is used is made once: by a step, or sent by the client."""
    for ensemble in subject.of(ENSEMBLE):
        for name, ends in _ends(subject, ensemble).items():
            made = sum(end.makes for end in ends)
            if made == 0:
                yield _fault(
                    ensemble,
                    f"Nothing makes the tensor {name}: it is no input of the ensemble and no output of a step.",
                    "Map the output of a step to it, or declare the input.",
                )
            elif all(end.model is ensemble for end in ends):
                yield _fault(ensemble, f"No step takes the input {name}.", "Map it to an input, or leave it out.")
            elif made > 1:
                yield _fault(ensemble, f"The tensor {name} is made by {made} steps.", "Give each a name of its own.")


def unequal_types(subject: Subject) -> Iterator[Fault]:
    """Both ends of a tensor have one type."""
    yield from _unequal(
        subject, lambda first, other: type_name(first.tensor) == type_name(other.tensor), "types", _type
    )


def unequal_dims(subject: Subject) -> Iterator[Fault]:
    """Both ends of a tensor have dims that can be equal."""
    yield from _unequal(subject, _fits, "dims", lambda end: str(list(end.dims)))


def _unequal(subject: Subject, fits: Any, what: str, shown: Any) -> Iterator[Fault]:
    for ensemble in subject.of(ENSEMBLE):
        for name, ends in _ends(subject, ensemble).items():
            other = next((end for end in ends[1:] if not fits(ends[0], end)), None)
            if other is not None:
                first = ends[0]
                yield _fault(
                    ensemble,
                    f"The tensor {name} has two {what}: {shown(first)} in {first.model.name} ({first.tensor.name}) and "
                    f"{shown(other)} in {other.model.name} ({other.tensor.name}).",
                    "Write the same in both files.",
                )


def _type(end: _End) -> str:
    return type_name(end.tensor)


def _fits(first: _End, other: _End) -> bool:
    """Triton compares what the models say, and with it the batch axes; -1 is equal to everything."""
    return _alike(first.dims, other.dims) or _alike(first.full, other.full)


def _alike(first: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(first) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(first, other, strict=True))


def larger_batches(subject: Subject) -> Iterator[Fault]:
    """No batch of the ensemble is too large for a step."""
    for ensemble in subject.of(ENSEMBLE):
        own = ensemble.config.max_batch_size
        for model in {model.name: model for _, model in _steps(subject, ensemble)}.values():
            taken = model.config.max_batch_size
            if taken < own:
                yield _fault(
                    ensemble,
                    f"It takes batches of {own}, and its step {model.name} takes {taken}.",
                    f"Set max_batch_size to the same number in all models, at most {taken} in {ensemble.name}.",
                )


def own_policy(subject: Subject) -> Iterator[Fault]:
    """An ensemble streams when a step does, and says nothing of it itself."""
    for ensemble in subject.of(ENSEMBLE):
        steps = [model for _, model in _steps(subject, ensemble)]
        if ensemble.decoupled and steps and not any(model.decoupled for model in steps):
            yield _fault(
                ensemble,
                "It says decoupled: true, and none of its steps is decoupled.",
                "Leave model_transaction_policy out of the ensemble, and set it in the core model.",
            )


def _steps(subject: Subject, ensemble: ModelFolder) -> Iterator[tuple[Any, ModelFolder]]:
    for step in ensemble.config.ensemble_scheduling.step:
        if step.model_name in subject.models:
            yield step, subject.models[step.model_name]


def _maps(
    subject: Subject, ensemble: ModelFolder
) -> Iterator[tuple[ModelFolder, Mapping[str, str], Mapping[str, Any]]]:
    for step, model in _steps(subject, ensemble):
        yield model, step.input_map, {tensor.name: tensor for tensor in model.config.input}
        yield model, step.output_map, {tensor.name: tensor for tensor in model.config.output}


def _ends(subject: Subject, ensemble: ModelFolder) -> dict[str, list[_End]]:
    """Ensemble tensor → its ends; empty while a step's model cannot be read, since that would be told again here."""
    if any(step.model_name not in subject.models for step in ensemble.config.ensemble_scheduling.step):
        return {}
    found: dict[str, list[_End]] = {}
    own = partial(_End, model=ensemble)
    for tensor in ensemble.config.input:
        found.setdefault(tensor.name, []).append(own(tensor=tensor, makes=True))
    for tensor in ensemble.config.output:
        found.setdefault(tensor.name, []).append(own(tensor=tensor, makes=False))
    for step, model in _steps(subject, ensemble):
        for mapped, declared, makes in (
            (step.input_map, model.config.input, False),
            (step.output_map, model.config.output, True),
        ):
            tensors = {tensor.name: tensor for tensor in declared}
            for name, target in mapped.items():
                if name in tensors:
                    found.setdefault(target, []).append(_End(model=model, tensor=tensors[name], makes=makes))
    return found


def _fault(ensemble: ModelFolder, what: str, fix: str) -> Fault:
    return Fault(model=ensemble.name, file=ensemble.file, what=what, fix=fix)

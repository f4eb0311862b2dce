"""Rules about ensembles: what Triton requires of their steps, maps, tensors and batches."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trtserve.repository.check.findings import Finding, Rule
from trtserve.repository.check.repository import ModelFolder, Repository
from trtserve.repository.config import type_name
from trtserve.repository.profiles import ENSEMBLE


@dataclass(frozen=True, kw_only=True)
class _End:
    """One end of an ensemble tensor: a tensor of a step's model, or of the ensemble itself."""

    model: ModelFolder
    tensor: Any
    makes: bool  # whether it is the source

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.tensor.dims)

    @property
    def batched_dims(self) -> tuple[int, ...]:
        return ((-1,) if self.model.config.max_batch_size > 0 else ()) + self.dims

    @property
    def described(self) -> str:
        return f"{type_name(self.tensor)} {list(self.dims)} in {self.model.name} ({self.tensor.name})"

    def fits(self, other: _End) -> bool:
        """Return whether the shapes may be equal: Triton compares them with and without the batch axes."""
        return _alike(self.dims, other.dims) or _alike(self.batched_dims, other.batched_dims)


def _alike(first: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(first) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(first, other, strict=True))


def absent_steps(repository: Repository) -> Iterator[Finding]:
    for ensemble in repository.of(ENSEMBLE):
        if not ensemble.config.ensemble_scheduling.step:
            yield ensemble.finding("It has no step.", "Copy the steps of NVIDIA's template.")
        for name in {step.model_name for step in ensemble.config.ensemble_scheduling.step}:
            if name not in repository.models and name not in repository.unread:
                close = difflib.get_close_matches(name, repository.models, n=1)
                yield ensemble.finding(
                    f"A step names the model {name!r}, which is not in the repository.",
                    f"Did you mean {close[0]}?" if close else f"It has: {', '.join(sorted(repository.models))}.",
                )


def wrong_maps(repository: Repository) -> Iterator[Finding]:  # noqa: C901 - one branch per fault
    """Maps name tensors of their step, every required input is mapped, every tensor has one source and a use."""
    for ensemble in repository.of(ENSEMBLE):
        for step, model in _steps(repository, ensemble):
            for mapped, tensors in ((step.input_map, model.config.input), (step.output_map, model.config.output)):
                for name in sorted(set(mapped) - {tensor.name for tensor in tensors}):
                    yield ensemble.finding(
                        f"The step {model.name} maps {name}, and that model declares no such tensor.",
                        "Declare it there, or remove the line from the map.",
                    )
            for tensor in model.config.input:
                if not tensor.optional and tensor.name not in step.input_map:
                    yield ensemble.finding(
                        f"The step {model.name} needs the input {tensor.name}, and nothing is mapped to it.",
                        "Map a tensor to it, or mark it optional in that model.",
                    )
        for name, ends in _tensors(repository, ensemble).items():
            sources = sum(end.makes for end in ends)
            if sources == 0:
                yield ensemble.finding(
                    f"The tensor {name} has no source: no input of the ensemble and no output of a step has that name.",
                    "Map the output of a step to it, or declare the input.",
                )
            elif all(end.model is ensemble for end in ends):
                yield ensemble.finding(f"No step uses the input {name}.", "Map it to an input, or remove it.")
            elif sources > 1:
                yield ensemble.finding(f"{sources} steps make the tensor {name}.", "Give each its own name.")


def unequal_tensors(repository: Repository) -> Iterator[Finding]:
    for ensemble in repository.of(ENSEMBLE):
        for name, (first, *others) in _tensors(repository, ensemble).items():
            for other in others:
                types, shapes = type_name(first.tensor) != type_name(other.tensor), not first.fits(other)
                if types or shapes:
                    yield ensemble.finding(
                        f"The tensor {name} has two {'types' if types else 'shapes'}: {first.described} and "
                        f"{other.described}.",
                        "Write the same in both files.",
                    )
                    break


def larger_batches(repository: Repository) -> Iterator[Finding]:
    for ensemble in repository.of(ENSEMBLE):
        own = ensemble.config.max_batch_size
        for model in {model.name: model for _, model in _steps(repository, ensemble)}.values():
            accepted = model.config.max_batch_size
            if accepted < own:
                yield ensemble.finding(
                    f"It accepts batches of {own}, and its step {model.name} accepts {accepted}.",
                    f"Set max_batch_size to the same number in all models, at most {accepted} in {ensemble.name}.",
                )


def own_policy(repository: Repository) -> Iterator[Finding]:
    for ensemble in repository.of(ENSEMBLE):
        steps = [model for _, model in _steps(repository, ensemble)]
        if ensemble.decoupled and steps and not any(model.decoupled for model in steps):
            yield ensemble.finding(
                "It sets decoupled: true, but none of its steps is decoupled.",
                "Remove model_transaction_policy from the ensemble, and set it in the core model.",
            )


def _steps(repository: Repository, ensemble: ModelFolder) -> Iterator[tuple[Any, ModelFolder]]:
    for step in ensemble.config.ensemble_scheduling.step:
        if step.model_name in repository.models:
            yield step, repository.models[step.model_name]


def _tensors(repository: Repository, ensemble: ModelFolder) -> dict[str, list[_End]]:
    """Return a map of ensemble tensors to their ends.

    It is empty while a step's model is missing or unreadable, which another rule reports.
    """
    if any(step.model_name not in repository.models for step in ensemble.config.ensemble_scheduling.step):
        return {}
    found: dict[str, list[_End]] = defaultdict(list)
    for tensor in ensemble.config.input:
        found[tensor.name].append(_End(model=ensemble, tensor=tensor, makes=True))
    for tensor in ensemble.config.output:
        found[tensor.name].append(_End(model=ensemble, tensor=tensor, makes=False))
    for step, model in _steps(repository, ensemble):
        inputs = {tensor.name: tensor for tensor in model.config.input}
        outputs = {tensor.name: tensor for tensor in model.config.output}
        for mapped, declared, makes in ((step.input_map, inputs, False), (step.output_map, outputs, True)):
            for name, target in mapped.items():
                if name in declared:
                    found[target].append(_End(model=model, tensor=declared[name], makes=makes))
    return found


RULES = (
    Rule("ensemble-step", absent_steps, "steps name models of the repository", stops=True),
    Rule("ensemble-map", wrong_maps, "maps are complete, and each tensor has one source", stops=True),
    Rule("ensemble-tensor", unequal_tensors, "both ends of a tensor have the same type and shape", stops=True),
    Rule("ensemble-batch", larger_batches, "batches fit every step", stops=True),
    Rule("ensemble-policy", own_policy, "it streams only if a step does", severity="warning"),
)

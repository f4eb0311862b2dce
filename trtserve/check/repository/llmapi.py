"""Rules about models of the LLM API: model.yaml, the model that it names, and what it says twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trtserve.check.repository.findings import Fault, refusal
from trtserve.check.repository.subject import LLMAPI, ModelFolder, Subject
from trtserve.errors import RepositoryError
from trtserve.releases.llm_arguments import dropped_argument, unknown_argument
from trtserve.repo.llmapi import KEYWORDS, OWN_KEYS, require_setting, require_weights
from trtserve.triton.core_models import LLMAPI_FILE, PARALLEL_SIZES, read_model_yaml

_TRITON = frozenset({"max_batch_size", "decoupled", "cancellation_check_period_ms", "multimodal"})


def no_settings(subject: Subject) -> Iterator[Fault]:
    """A model of the LLM API has its model.yaml."""
    for model in subject.of(LLMAPI):
        if not (model.version / LLMAPI_FILE).is_file():
            yield _fault(model, f"There is no {LLMAPI_FILE}.", "It needs a line such as: model: /models/llama")


def unknown(subject: Subject) -> Iterator[Fault]:
    """Every key of model.yaml is one of the LLM's."""
    for model, settings in _settings(subject):
        for key in sorted(map(str, settings)):
            if (fix := unknown_argument(key, besides=OWN_KEYS)) is not None:
                yield _fault(model, f"The LLM has no keyword {key}, and refuses those that it does not have.", fix)
        triton = settings.get("triton_config")
        for key in sorted(map(str, set(triton if isinstance(triton, Mapping) else ()) - _TRITON)):
            yield _fault(model, f"triton_config has no key {key}.", f"It has {', '.join(sorted(_TRITON))}.")


def dropped(subject: Subject) -> Iterator[Fault]:
    """No key of model.yaml is one that a release dropped."""
    for model, settings in _settings(subject):
        release = subject.parameter_release(model)
        for key in sorted(map(str, settings)) if release is not None else ():
            if (gone := dropped_argument(key, str(release))) is not None:
                yield _fault(
                    model, f"The LLM has no keyword {key} after release {gone[0]}.", f"Leave it out: {gone[1]}."
                )


def wrong_values(subject: Subject) -> Iterator[Fault]:
    """The values of known keys are of their kind."""
    for model, settings in _settings(subject):
        # A size that is no number is why the model's files cannot be read, which is told already.
        told = PARALLEL_SIZES if model.fault is not None else ()
        for key, value in _flat(settings):
            error = refusal(partial(require_setting, key, value)) if key in KEYWORDS and key not in told else None
            if error is not None:
                yield _fault(model, error.message.removeprefix("--set "), "Correct it in model.yaml.")


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def absent_model(subject: Subject) -> Iterator[Fault]:
    """The model is a folder with weights, or has the form of a hub's name."""
    for model, settings in _settings(subject):
        text = str(settings["model"])
        folder = subject.located(text, model.name)
        if folder.is_dir():
            if (error := refusal(partial(require_weights, folder))) is not None:
                yield _fault(model, error.message, error.hint or "")
        elif text.startswith((".", "/")) or text.count("/") > 1:
            yield _fault(
                model,
                f"model is {text!r}, which is no folder on this machine and no name of the hub.",
                "Name the folder of the model relative to the repository, or as AUTHOR/MODEL.",
            )


def other_ranks(subject: Subject) -> Iterator[Fault]:
    """model.yaml has the parallelism that the manifest tells."""
    for model, settings in _settings(subject):
        facts = subject.member(model.name)
        for key, fact in (("tensor_parallel_size", "tp_size"), ("pipeline_parallel_size", "pp_size")):
            said, told = settings.get(key, 1), facts.get(fact)
            if model.fault is None and told is not None and said != told:
                yield _fault(
                    model,
                    f"model.yaml says {key}: {said}, and the manifest {told}.",
                    "Make the repository again with --tp-size and --pp-size: servers count their ranks by it.",
                )


def other_policy(subject: Subject) -> Iterator[Fault]:
    """config.pbtxt and model.yaml agree about streaming and batches: servers start without auto-completion."""
    for model, settings in _settings(subject):
        triton = settings.get("triton_config")
        triton = triton if isinstance(triton, Mapping) else {}
        for what, yaml, pbtxt in (
            ("decoupled", bool(triton.get("decoupled", False)), model.decoupled),
            ("max_batch_size", triton.get("max_batch_size") or 0, model.config.max_batch_size),
        ):
            if yaml != pbtxt:
                yield _fault(
                    model,
                    f"model.yaml says {what}: {str(yaml).lower()}, and config.pbtxt {str(pbtxt).lower()}.",
                    "Write the same in both; the launcher switches auto-completion off.",
                )


def _settings(subject: Subject) -> Iterator[tuple[ModelFolder, Mapping[str, Any]]]:
    for model in subject.of(LLMAPI):
        settings = _content(model)
        if settings:
            yield model, settings


def _content(model: ModelFolder) -> Mapping[str, Any]:
    """The model.yaml of a model, also where a value in it is wrong; empty when it cannot be read at all."""
    if model.core is not None:
        return model.core.settings
    try:
        return read_model_yaml(_file(model))
    except RepositoryError:
        return {}


def _fault(model: ModelFolder, what: str, fix: str) -> Fault:
    return Fault(model=model.name, file=_file(model), what=what, fix=fix)


def _file(model: ModelFolder) -> Path:
    return model.version / LLMAPI_FILE

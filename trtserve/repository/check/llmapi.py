"""Rules about models of the LLM API: model.yaml, the model that it names, and what other files repeat of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trtserve.errors import RepositoryError
from trtserve.nvidia.releases.options import dropped_argument, unknown_argument
from trtserve.repository.check.repository import LLMAPI, ModelFolder, Repository
from trtserve.repository.check.rules import Finding, model_rule, of_role, refusal, rule
from trtserve.repository.llmapi import KEYWORDS, OWN_KEYS, require_setting, require_weights
from trtserve.repository.served import LLMAPI_FILE, PARALLEL_SIZES, read_model_yaml

_TRITON_KEYS = frozenset({"max_batch_size", "decoupled", "cancellation_check_period_ms", "multimodal"})


@model_rule("llmapi-settings", "there is a model.yaml", of_role(LLMAPI), stops=True)
def missing_settings(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    if not _file(model).is_file():
        yield model.finding(
            f"There is no {LLMAPI_FILE}.", "It needs a line such as: model: /models/llama", _file(model)
        )


@rule("llmapi-keyword", "the LLM has every argument", severity="warning")
def unknown_arguments(repository: Repository) -> Iterator[Finding]:
    for model, settings in _settings(repository):
        for key in sorted(map(str, settings)):
            if (advice := unknown_argument(key, others=OWN_KEYS)) is not None:
                yield model.finding(f"The LLM has no argument {key} and refuses it.", advice, _file(model))
        for key in sorted(map(str, set(_triton_config(settings)) - _TRITON_KEYS)):
            known = f"It has {', '.join(sorted(_TRITON_KEYS))}."
            yield model.finding(f"triton_config has no key {key}.", known, _file(model))


@rule("llmapi-dropped", "no argument was dropped")
def dropped_arguments(repository: Repository) -> Iterator[Finding]:
    for model, settings in _settings(repository):
        release = repository.parameter_release(model)
        for key in sorted(map(str, settings)) if release is not None else ():
            if (dropped := dropped_argument(key, str(release))) is not None:
                last, instead = dropped
                what = f"The LLM has no argument {key} after release {last}."
                yield model.finding(what, f"Remove it: {instead}.", _file(model))


@rule("llmapi-value", "values are of their kind")
def wrong_values(repository: Repository) -> Iterator[Finding]:
    for model, settings in _settings(repository):
        # A size that is not a number makes the model's files unreadable, which another rule reports.
        reported = PARALLEL_SIZES if model.unreadable is not None else ()
        for key, value in _flat(settings):
            if key in KEYWORDS and key not in reported:
                error = refusal(partial(require_setting, key, value))
                if error is not None:
                    what = error.message.removeprefix("--set ")
                    yield model.finding(what, f"Correct it in {LLMAPI_FILE}.", _file(model))


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


@rule("llmapi-model", "the model exists")
def absent_models(repository: Repository) -> Iterator[Finding]:
    """The model is a folder with weights, or looks like a name on the hub."""
    for model, settings in _settings(repository):
        text = str(settings["model"])
        folder = repository.located(text, model.name)
        if folder.is_dir():
            if (error := refusal(partial(require_weights, folder))) is not None:
                yield model.finding(error.message, error.hint or "", _file(model))
        elif text.startswith((".", "/")) or text.count("/") > 1:
            yield model.finding(
                f"model is {text!r}, which is neither a folder on this machine nor a name on the hub.",
                "Name the folder of the model relative to the repository, or as AUTHOR/MODEL.",
                _file(model),
            )


@rule("llmapi-ranks", "manifest and model.yaml have one parallelism")
def different_parallelism(repository: Repository) -> Iterator[Finding]:
    for model, settings in _settings(repository):
        part = repository.part(model.name)
        for key, fact in (("tensor_parallel_size", "tp_size"), ("pipeline_parallel_size", "pp_size")):
            found, recorded = settings.get(key, 1), part.get(fact)
            if model.unreadable is None and recorded is not None and found != recorded:
                yield model.finding(
                    f"{LLMAPI_FILE} has {key}: {found}, and the manifest {recorded}.",
                    "Make the repository again with --tp-size and --pp-size: the server starts that many ranks.",
                    _file(model),
                )


@rule("llmapi-policy", "config.pbtxt and model.yaml agree")
def different_policies(repository: Repository) -> Iterator[Finding]:
    """Both files agree about streaming and batches: servers start without auto-completion."""
    for model, settings in _settings(repository):
        triton = _triton_config(settings)
        for what, in_yaml, in_config in (
            ("decoupled", bool(triton.get("decoupled", False)), model.decoupled),
            ("max_batch_size", triton.get("max_batch_size") or 0, model.config.max_batch_size),
        ):
            if in_yaml != in_config:
                yield model.finding(
                    f"{LLMAPI_FILE} has {what}: {str(in_yaml).lower()}, and config.pbtxt {str(in_config).lower()}.",
                    "Write the same in both; the launcher switches auto-completion off.",
                    _file(model),
                )


def _settings(repository: Repository) -> Iterator[tuple[ModelFolder, Mapping[str, Any]]]:
    """Models with the content of model.yaml, even if a value in it is wrong; without those that cannot be read."""
    for model in repository.of(LLMAPI):
        try:
            settings = model.core.settings if model.core is not None else read_model_yaml(_file(model))
        except RepositoryError:
            continue
        if settings:
            yield model, settings


def _triton_config(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    found = settings.get("triton_config")
    return found if isinstance(found, Mapping) else {}


def _file(model: ModelFolder) -> Path:
    return model.version / LLMAPI_FILE

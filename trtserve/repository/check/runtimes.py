"""Rules about models of the LLM API (model.yaml) and of vLLM's backend (model.json): what their files name exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trtserve.errors import CorruptFileError, RepositoryError, TrtserveError
from trtserve.executor.vllm.arguments import ADAPTERS, BACKEND, MODEL_JSON, PARALLEL_SIZES, ModelJson, read_adapters
from trtserve.executor.vllm.installation import VllmInstallation, any_release, find_installation
from trtserve.files import read_json_object
from trtserve.nvidia.releases.options import dropped_argument, unknown_argument
from trtserve.repository.check.repository import LLMAPI, ModelFolder, Repository
from trtserve.repository.check.rules import Finding, model_rule, of_role, refusal, rule
from trtserve.repository.llmapi import KEYWORDS, OWN_KEYS, require_setting, require_weights
from trtserve.repository.served import LLMAPI_FILE, read_model_yaml

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
        yield from _absent(model, text, repository.located(text, model.name), _file(model))


def _absent(model: ModelFolder, text: str, folder: Path, file: Path) -> Iterator[Finding]:
    if folder.is_dir():
        if (error := refusal(partial(require_weights, folder))) is not None:
            yield model.finding(error.message, error.hint or "", file)
    elif text.startswith((".", "/")) or text.count("/") > 1:
        yield model.finding(
            f"model is {text!r}, which is neither a folder on this machine nor a name on the hub.",
            "Name the folder of the model relative to the repository, or as AUTHOR/MODEL.",
            file,
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


def _models(repository: Repository) -> Iterable[ModelFolder]:
    return (model for model in repository.models.values() if model.core is not None and model.core.backend == BACKEND)


def _model_json(model: ModelFolder) -> ModelJson:
    return ModelJson(model.core.settings if model.core is not None else {})


@model_rule("vllm-argument", "vLLM's engine has every argument", _models)
def unknown_vllm_arguments(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    yield from _refused(model, lambda found: found.require_arguments(_model_json(model).arguments))


@model_rule("vllm-model", "vLLM loads the model", _models)
def unknown_models(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    """The model is a folder with weights of a known architecture, or looks like a name on the hub."""
    settings = _model_json(model)
    folder = repository.path / settings.model
    absent = list(_absent(model, settings.model, folder, model.version / MODEL_JSON))
    yield from absent
    if not absent and folder.is_dir() and "model_impl" not in settings.arguments:
        names = read_json_object(folder / "config.json", CorruptFileError).get("architectures") or ["None"]
        yield from _refused(model, lambda found: found.require_architecture(str(names[0]), pools=settings.pools))


@model_rule("vllm-adapters", "the adapters exist", _models, stops=True)
def absent_adapters(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    if not _model_json(model).adapters:
        return
    file = model.version / ADAPTERS
    if (error := refusal(partial(read_adapters, model.version))) is not None:
        yield model.finding(error.message, error.hint or "", file)
        return
    for name, folder in read_adapters(model.version).items():
        if not (repository.path / folder).is_dir():
            yield model.finding(f"The adapter {name} is {folder!r}, which is not a folder.", "Correct its path.", file)


@model_rule("vllm-gpus", "the GPUs are as many as the ranks", _models, stops=True)
def wrong_gpus(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    ranks = model.core.world_size if model.core is not None else 1
    kinds = {group.kind for group in model.config.instance_group}
    if ranks > 1 and model.config.instance_group and model.config.instance_group[0].KIND_GPU in kinds:
        yield model.finding(f"{ranks} ranks need KIND_MODEL; KIND_GPU gives one GPU.", "Write kind: KIND_MODEL.")
    ids = [each for each in model.parameters.get("GPU_DEVICE_IDS", "").split(",") if each.strip()]
    if ids and (len(ids) != ranks or len(set(ids)) != ranks or not all(each.strip().isdigit() for each in ids)):
        yield model.finding(
            f"GPU_DEVICE_IDS is {','.join(ids)!r}; model.json has {ranks} ranks, which need a GPU each.",
            "Correct it, or remove it: vLLM takes the first GPUs then.",
        )


@model_rule("vllm-metrics", "metrics are those of our backend", _models, severity="warning")
def other_metrics(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    if model.is_true("REPORT_CUSTOM_METRICS"):
        yield model.finding(
            "REPORT_CUSTOM_METRICS works in NVIDIA's image only; trtserve's own backend ignores it.",
            "Start it with --container 26.08, or import the model: trtserve import MODEL --runtime vllm.",
        )


def _refused(model: ModelFolder, require: Callable[[VllmInstallation], None]) -> Iterator[Finding]:
    """Yield what the vLLM here, else any release, refuses."""
    try:
        require(find_installation() or any_release())
    except TrtserveError as error:
        what = error.message.removeprefix("--set ").replace("neither a parameter of a Triton model nor", "not")
        yield model.finding(what, error.hint or "", model.version / MODEL_JSON)

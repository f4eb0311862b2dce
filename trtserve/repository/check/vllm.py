"""Rules about models of NVIDIA's Triton backend `vllm`: model.json, its adapters, and the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from trtserve.errors import CorruptFileError, TrtserveError
from trtserve.executor.vllm.installation import SomeRelease, VllmInstallation, find_installation
from trtserve.executor.vllm.model_json import ADAPTERS, BACKEND, MODEL_JSON, ModelJson, read_adapters
from trtserve.files import read_json_object
from trtserve.repository.check.repository import ModelFolder, Repository
from trtserve.repository.check.rules import Finding, model_rule, refusal
from trtserve.repository.llmapi import require_weights


def _models(repository: Repository) -> Iterable[ModelFolder]:
    return (model for model in repository.models.values() if model.core is not None and model.core.backend == BACKEND)


def _settings(model: ModelFolder) -> ModelJson:
    return ModelJson(model.core.settings if model.core is not None else {})


@model_rule("vllm-argument", "vLLM's engine has every argument", _models)
def unknown_vllm_arguments(_: Repository, model: ModelFolder) -> Iterator[Finding]:
    yield from _refused(model, lambda found: found.require_arguments(_settings(model).arguments))


@model_rule("vllm-model", "vLLM loads the model", _models)
def unknown_models(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    """The model is a folder with weights of a known architecture, or looks like a name on the hub."""
    settings = _settings(model)
    folder = repository.path / settings.model
    if folder.is_dir():
        if (error := refusal(partial(require_weights, folder))) is not None:
            yield model.finding(error.message, error.hint or "", model.version / MODEL_JSON)
        elif "model_impl" not in settings.arguments:
            names = read_json_object(folder / "config.json", CorruptFileError).get("architectures") or ["None"]
            yield from _refused(model, lambda found: found.require_architecture(str(names[0])))
    elif settings.model.startswith((".", "/")) or settings.model.count("/") > 1:
        yield model.finding(
            f"model is {settings.model!r}, which is neither a folder on this machine nor a name on the hub.",
            "Name the folder, or the model as AUTHOR/MODEL.",
            model.version / MODEL_JSON,
        )


@model_rule("vllm-adapters", "the adapters exist", _models, stops=True)
def absent_adapters(repository: Repository, model: ModelFolder) -> Iterator[Finding]:
    if not _settings(model).adapters:
        return
    file = model.version / ADAPTERS
    if (error := refusal(partial(read_adapters, model.version))) is not None:
        yield model.finding(error.message, error.hint or "", file)
        return
    for name, folder in read_adapters(model.version).items():
        if not (repository.path / folder).is_dir():
            yield model.finding(f"The adapter {name} is {folder!r}, which is no folder.", "Correct its path.", file)


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
        require(find_installation() or SomeRelease(Path(), Path()))
    except TrtserveError as error:
        what = error.message.removeprefix("--set ").replace("neither a parameter of a Triton model nor", "not")
        yield model.finding(what, error.hint or "", model.version / MODEL_JSON)

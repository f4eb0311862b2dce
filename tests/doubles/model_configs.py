"""Model repository of the tritonserver double: every config.pbtxt goes through the real protobuf parser.

Error texts are those of a real tritonserver 2.51.0.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PLACEHOLDER = re.compile(r"\$\{[^}]*\}")
BACKENDS = frozenset({"tensorrtllm", "python"})


class LoadError(Exception):
    """A model that cannot be loaded, with the text for the log."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of the repository with its parsed configuration."""

    name: str
    folder: Path
    config: Any  # inference.ModelConfig

    @property
    def backend(self) -> str:
        """`tensorrtllm`, `python` or `ensemble`."""
        return "ensemble" if self.config.platform == "ensemble" else str(self.config.backend)

    @property
    def is_core(self) -> bool:
        """Whether the model runs an engine: the C++ backend, or the Python variant with a path to an engine."""
        if self.backend == "tensorrtllm":
            return True
        return self.backend == "python" and "gpt_model_type" in self.config.parameters

    def parameter(self, name: str) -> str | None:
        """Return a parameter's text; None when it is absent, unfilled or empty."""
        if name not in self.config.parameters:
            return None
        text = str(self.config.parameters[name].string_value)
        return None if not text or _PLACEHOLDER.fullmatch(text) else text


def _messages() -> Any:
    """The generated module of model_config.proto, without importing tritonclient (and with it grpc and numpy)."""
    name = "tritonclient/grpc/model_config_pb2.py"
    path = next(Path(entry, name) for entry in sys.path if Path(entry, name).exists())
    spec = importlib.util.spec_from_file_location("double_model_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(folder: Path, messages: Any) -> Model:
    from google.protobuf import text_format

    path = folder / "config.pbtxt"
    if not path.exists():
        # Only auto-completion would make one, and neither backend offers that without an engine's help.
        raise LoadError(f"failed to open text file for read {path}: No such file or directory")
    text = path.read_text(encoding="utf-8")
    config = messages.ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        raise LoadError(
            f"[libprotobuf ERROR text_format.cc:337] Error parsing text-format inference.ModelConfig: {error}\n"
            f"failed to read text proto from {path}"
        ) from None
    if config.name and config.name != folder.name:
        raise LoadError(
            f"unexpected directory name '{folder.name}' for model '{config.name}', directory name must equal model name"
        )
    model = Model(name=folder.name, folder=folder, config=config)
    _check(model)
    return model


def _check(model: Model) -> None:
    config = model.config
    if model.backend != "ensemble" and model.backend not in BACKENDS:
        raise LoadError(
            f"unexpected platform type '{config.platform}' for {model.name}"
            if not config.backend
            else f"unable to find backend library for backend '{config.backend}', try specifying runtime on the model "
            "configuration."
        )
    versions = [entry for entry in model.folder.iterdir() if entry.is_dir() and entry.name.isdigit()]
    if not versions:
        raise LoadError(f"at least one version must be available under the version policy of model '{model.name}'")
    if model.backend == "python" and not any((version / "model.py").exists() for version in versions):
        raise LoadError(
            f"failed to load '{model.name}' version 1: Internal: model.py does not exist in the model folder"
        )
    if config.max_batch_size < 0:
        raise LoadError(f"'max_batch_size' must be non-negative value in model configuration of {model.name}")
    if not config.input or not config.output:
        raise LoadError(f"model configuration of {model.name} must contain at least one input and one output")
    for tensor in (*config.input, *config.output):
        if tensor.data_type == 0:
            raise LoadError(f"model output must specify 'data_type' for tensor '{tensor.name}' of {model.name}")
        if not tensor.dims:
            raise LoadError(f"tensor '{tensor.name}' of {model.name} must specify 'dims'")


def _try_to_read(folder: Path, messages: Any) -> Model | LoadError:
    try:
        return _read(folder, messages)
    except LoadError as error:
        return error


def read_repository(folders: list[str]) -> tuple[dict[str, Model], dict[str, str]]:
    """Return models by name, and the faults of the others; LoadError when a folder is missing."""
    messages = _messages()
    models: dict[str, Model] = {}
    wrong: dict[str, str] = {}
    for text in folders:
        folder = Path(text)
        if not folder.is_dir():
            raise LoadError(f"failed to stat file {folder}")
        for entry in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            model = _try_to_read(entry.resolve(), messages)
            if isinstance(model, Model):
                models[entry.name] = model
            else:
                wrong[entry.name] = str(model)
    return models, wrong


def _mapped(step: Any, target: Any) -> list[tuple[str, str, Any]]:
    """Return (ensemble's tensor, name of the model's tensor, model's tensor or None) for both maps of a step."""
    found: list[tuple[str, str, Any]] = []
    for given, tensors in ((step.input_map, target.input), (step.output_map, target.output)):
        known = {tensor.name: tensor for tensor in tensors}
        found += [(given[name], name, known.get(name)) for name in given]
    return found


def _check_step(ensemble: str, step: Any, models: dict[str, Model], types: dict[str, tuple[int, str]]) -> str | None:
    """Return the fault of one step, and add the ensemble's tensors that it maps to `types`."""
    if step.model_name not in models:
        return f"ensemble {ensemble} contains models that are not available or ambiguous: {step.model_name}"
    target = models[step.model_name].config
    for own, name, tensor in _mapped(step, target):
        if tensor is None:
            return (
                f"in ensemble {ensemble}, ensemble tensor {own} is mapped to non-existing tensor {name} of model "
                f"{step.model_name}"
            )
        kind, origin = types.setdefault(own, (tensor.data_type, step.model_name))
        if kind != tensor.data_type:
            return (
                f"in ensemble {ensemble}, ensemble tensor {own}: inconsistent data type: {kind} is inferred from model "
                f"{origin} while {tensor.data_type} is inferred from model {step.model_name}"
            )
    missing = [tensor.name for tensor in target.input if not tensor.optional and tensor.name not in step.input_map]
    return f"in ensemble {ensemble}, {step.model_name} needs its input {missing[0]}" if missing else None


def check_ensembles(models: dict[str, Model]) -> dict[str, str]:
    """Find ensembles whose steps name missing models or tensors, or join tensors of two types."""
    wrong: dict[str, str] = {}
    for model in models.values():
        if model.backend != "ensemble":
            continue
        own = (*model.config.input, *model.config.output)
        types = {tensor.name: (tensor.data_type, model.name) for tensor in own}
        for step in model.config.ensemble_scheduling.step:
            if problem := _check_step(model.name, step, models, types):
                wrong[model.name] = problem
    return wrong

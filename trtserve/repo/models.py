"""The folders of a repository's models: configuration, program, and what the program is told beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from trtserve.repo.placement import VERSION
from trtserve.triton.config import ConfigOptions, config_text
from trtserve.triton.parameters import CLASSES_FILE, classes_json
from trtserve.triton.profiles import BLS, CORE, ENSEMBLE, MODELS, POSTPROCESSING, PREPROCESSING, Profile

LLMAPI, LLMAPI_BLS = "llmapi", "llmapi_bls"
_SOURCES = Path(__file__).parents[1] / "triton" / "models"
_SHARED = {
    PREPROCESSING: ("hf_tokenizer", "lora_names", "model_parameters", "parameter_classes"),
    POSTPROCESSING: ("hf_tokenizer", "model_parameters"),
    CORE: ("core_pulls", "guarded_sender", "model_parameters", "parameter_classes", "periodic"),
    BLS: (
        "guarded_sender",
        "inner_models",
        "lora_names",
        "model_parameters",
        "parameter_classes",
        "periodic",
        "text_model",
    ),
    ENSEMBLE: (),
    LLMAPI: ("core_pulls", "guarded_sender", "periodic"),
    LLMAPI_BLS: ("guarded_sender", "inner_models", "model_parameters", "periodic", "text_model"),
}


def write_program(folder: Path, template: str) -> None:
    """Put the files of the model program `template` into the new folder `folder`."""
    folder.mkdir(parents=True)
    for source in _python_files(template):
        shutil.copyfile(source, folder / source.name)


def write_model(folder: Path, template: str, table: Profile, options: ConfigOptions, *, embedded: bool) -> None:
    """Make the new folder of one model, which has the folder's name and is otherwise the model `template`."""
    version = folder / VERSION
    write_program(version, template)
    text = config_text(table, template, options, name=folder.name)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    if template == ENSEMBLE:
        # Tools that drop empty folders would make Triton refuse the model.
        (version / ".tmp").touch()
    if embedded and (classes := classes_json(template, table.release)):
        (version / CLASSES_FILE).write_text(classes, encoding="utf-8")


def model_sources(models: tuple[str, ...] = MODELS) -> list[Path]:
    """Every program file of `models`."""
    return [path for model in models for path in _python_files(model)]


def _python_files(model: str) -> list[Path]:
    """The model's own files and those that it shares with other models; each model imports only its own folder."""
    shared = [_SOURCES / "shared" / f"{name}.py" for name in _SHARED[model]]
    return sorted((_SOURCES / model / VERSION).glob("*.py")) + shared

"""The folders of a repository's models: configuration, program, and what the program is told beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from trtserve.repo.placement import VERSION
from trtserve.triton.config import ConfigOptions, config_text
from trtserve.triton.parameters import CLASSES_FILE, classes_json
from trtserve.triton.profiles import BLS, CORE, ENSEMBLE, MODELS, POSTPROCESSING, PREPROCESSING, Profile

_SOURCES = Path(__file__).parents[1] / "triton" / "models"
_SHARED = {
    PREPROCESSING: ("hf_tokenizer", "lora_names", "model_parameters", "parameter_classes"),
    POSTPROCESSING: ("hf_tokenizer", "model_parameters"),
    CORE: ("guarded_sender", "model_parameters", "parameter_classes"),
    BLS: ("guarded_sender", "lora_names", "model_parameters", "parameter_classes"),
    ENSEMBLE: (),
}


def write_model(folder: Path, template: str, table: Profile, options: ConfigOptions, *, embedded: bool) -> None:
    """Make the new folder of one model, which has the folder's name and is otherwise the model `template`."""
    version = folder / VERSION
    version.mkdir(parents=True)
    text = config_text(table, template, options, name=folder.name)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    if template == ENSEMBLE:
        # Tools that drop empty folders would make Triton refuse the model.
        (version / ".tmp").touch()
    for source in _python_files(template):
        shutil.copyfile(source, version / source.name)
    if embedded and (classes := classes_json(template, table.release)):
        (version / CLASSES_FILE).write_text(classes, encoding="utf-8")


def model_sources() -> list[Path]:
    """Every program file of every model."""
    return [path for model in MODELS for path in _python_files(model)]


def _python_files(model: str) -> list[Path]:
    """The model's own files and those that it shares with other models; each model imports only its own folder."""
    shared = [_SOURCES / "shared" / f"{name}.py" for name in _SHARED[model]]
    return sorted((_SOURCES / model / VERSION).glob("*.py")) + shared

"""Names of a repository's models and paths of its parts, and how the configurations refer to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtserve.repository.config import ConfigOptions
from trtserve.repository.profiles import (
    BLS,
    CORE,
    DRAFT,
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
)
from trtserve.specs import RepositorySpec

VERSION = "1"
TOKENIZER = f"{PREPROCESSING}/{VERSION}/tokenizer"
ENGINE = f"{CORE}/{VERSION}"
LORA_TABLE = "lora"
_PATH_KEYS = ("tokenizer_dir", "gpt_model_path")


def model_names(suffix: str) -> dict[str, str]:
    """Return model of the profile → its name in the repository."""
    return {model: f"{model}{suffix}" for model in (*MODELS, DRAFT)}


def lora_table(suffix: str) -> str:
    """Return the name of the file that lists the adapters of the models with this suffix."""
    return f"{LORA_TABLE}{suffix}.json"


def root_of(spec: RepositorySpec, path: Path) -> str:
    """Return the prefix of every path in the configurations of the repository at `path`.

    Returns "" for relative paths.
    """
    if spec.container_paths is not None:
        return spec.container_paths.rstrip("/") + "/"
    return f"{path}/" if spec.absolute_paths else ""


def placed(options: ConfigOptions, suffix: str, root: str) -> ConfigOptions:
    """Return `options` with suffixed model names, and with paths below `root`."""
    names = model_names(suffix)
    paths = {
        TOKENIZER: f"{root}{names[PREPROCESSING]}/{VERSION}/tokenizer",
        **{f"{model}/{VERSION}": f"{root}{names[model]}/{VERSION}" for model in (CORE, DRAFT)},
    }
    parameters = {
        model: {key: paths.get(text, text) if key in _PATH_KEYS else text for key, text in given.items()}
        for model, given in options.parameters.items()
    }
    if suffix:
        # The BLS model must be told names that differ from the defaults.
        parameters[BLS] = {
            "tensorrt_llm_model_name": names[CORE],
            "preprocessing_model_name": names[PREPROCESSING],
            "postprocessing_model_name": names[POSTPROCESSING],
            "lora_table": lora_table(suffix),
            **parameters.get(BLS, {}),
        }
        # Names that `repo` set get the suffix; names that the user set stay.
        for key, model in (("tensorrt_llm_model_name", CORE), ("tensorrt_llm_draft_model_name", DRAFT)):
            if parameters[BLS].get(key) == model:
                parameters[BLS][key] = names[model]
        parameters[PREPROCESSING] = {"lora_table": lora_table(suffix), **parameters.get(PREPROCESSING, {})}
    return replace(options, parameters=parameters, model_names=names)

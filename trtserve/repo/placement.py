"""Where the parts of a repository lie, how its models are called, and how its configurations name both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trtserve.specs import RepositorySpec
from trtserve.triton.config import ConfigOptions
from trtserve.triton.profiles import BLS, CORE, DRAFT, MODELS, POSTPROCESSING, PREPROCESSING

VERSION = "1"
TOKENIZER = f"{PREPROCESSING}/{VERSION}/tokenizer"
ENGINE = f"{CORE}/{VERSION}"
LORA_TABLE = "lora"
_PATH_KEYS = ("tokenizer_dir", "gpt_model_path")


def model_names(suffix: str) -> dict[str, str]:
    """Model of the profile → its name in the repository."""
    return {model: f"{model}{suffix}" for model in (*MODELS, DRAFT)}


def lora_table(suffix: str) -> str:
    """Name of the file that tells the adapters of the models with this suffix."""
    return f"{LORA_TABLE}{suffix}.json"


def root_of(spec: RepositorySpec, path: Path) -> str:
    """What stands before every path in the configurations of the repository at `path`; empty for relative ones."""
    if spec.container_paths is not None:
        return spec.container_paths.rstrip("/") + "/"
    return f"{path}/" if spec.absolute_paths else ""


def placed(options: ConfigOptions, suffix: str, root: str) -> ConfigOptions:
    """`options`, whose names and paths are those without a suffix and relative, as they are to be written."""
    names = model_names(suffix)
    parameters = {model: _placed_paths(given, names, root) for model, given in options.parameters.items()}
    if suffix:
        parameters[BLS] = {**_inner_names(names, suffix), **parameters.get(BLS, {})}
        parameters[BLS] = {key: _renamed(key, value, names) for key, value in parameters[BLS].items()}
        parameters[PREPROCESSING] = {"lora_table": lora_table(suffix), **parameters.get(PREPROCESSING, {})}
    return replace(options, parameters=parameters, model_names=names)


def _inner_names(names: Mapping[str, str], suffix: str) -> dict[str, str]:
    """What the BLS model must be told where the models do not have the names that it knows."""
    return {
        "tensorrt_llm_model_name": names[CORE],
        "preprocessing_model_name": names[PREPROCESSING],
        "postprocessing_model_name": names[POSTPROCESSING],
        "lora_table": lora_table(suffix),
    }


def _renamed(key: str, value: str, names: Mapping[str, str]) -> str:
    """Names that `repo` gave itself; what the user wrote is left alone."""
    own = {"tensorrt_llm_model_name": CORE, "tensorrt_llm_draft_model_name": DRAFT}
    return names[value] if own.get(key) == value else value


def _placed_paths(given: Mapping[str, str], names: Mapping[str, str], root: str) -> dict[str, str]:
    own = {
        TOKENIZER: f"{names[PREPROCESSING]}/{VERSION}/tokenizer",
        **{f"{model}/{VERSION}": f"{names[model]}/{VERSION}" for model in (CORE, DRAFT)},
    }
    return {key: f"{root}{own[text]}" if key in _PATH_KEYS and text in own else text for key, text in given.items()}

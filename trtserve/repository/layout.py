"""What a model repository looks like: names of its models, paths of its parts, and its tree as text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtserve.repository.config import ConfigOptions
from trtserve.repository.profiles import BLS, CLASSES_FILE, CORE, DRAFT, MODELS, POSTPROCESSING, PREPROCESSING
from trtserve.specs import RepositorySpec

VERSION = "1"
PACKAGE = "trtserve_models"
"""Name of the copied package with a model's program, in the version folder of each model."""

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
        # The BLS model needs the names that differ from the defaults.
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


# Parts of a program that are not worth listing.
_CODE = (PACKAGE, CLASSES_FILE, "__pycache__")
_MOST_RANKS = 4


def tree(path: Path) -> str:
    """Return the repository as lines of text: models first, each with its files; code modules are left out."""
    entries = sorted(
        (entry for entry in path.iterdir() if _is_shown(entry)), key=lambda entry: (not entry.is_dir(), entry.name)
    )
    width = max((len(entry.name) for entry in entries if entry.is_dir()), default=0)
    lines = [f"{path.name}/"]
    for entry in entries:
        branch = "└── " if entry is entries[-1] else "├── "
        files = f"{'':{width - len(entry.name)}}  {', '.join(_contents(entry))}" if entry.is_dir() else ""
        lines.append(f"{branch}{entry.name}{'/' if entry.is_dir() else ''}{files}".rstrip())
    return "\n".join(lines)


def _is_shown(entry: Path) -> bool:
    return not entry.name.startswith(".") and entry.name not in _CODE


def _contents(model: Path) -> list[str]:
    """Return the files of a model and of its version folders; many ranks are shortened."""
    found = []
    for entry in sorted(filter(_is_shown, model.iterdir()), key=lambda entry: (entry.is_dir(), entry.name)):
        inner = sorted(each for each in entry.iterdir() if _is_shown(each)) if entry.is_dir() else []
        found += [f"{entry.name}/{each.name}{'/' if each.is_dir() else ''}" for each in inner]
        if not inner:
            found.append(f"{entry.name}{'/' if entry.is_dir() else ''}")
    ranks = [name for name in found if Path(name).name.startswith("rank")]
    if len(ranks) > _MOST_RANKS:
        others = [name for name in found if name not in ranks]
        found = [*others, f"{ranks[0]} and {len(ranks) - 1} more of its kind"]
    return found

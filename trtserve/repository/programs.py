"""What a model repository looks like: names of models, their folders, configurations and programs, its tree."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from trtserve.errors import RepositoryError
from trtserve.files import whole_number
from trtserve.repository.config import ConfigOptions, config_text
from trtserve.repository.profiles import (
    BLS,
    CLASSES_FILE,
    CORE,
    DRAFT,
    ENSEMBLE,
    MODELS,
    POSTPROCESSING,
    PREPROCESSING,
    Profile,
    classes_json,
)
from trtserve.specs import RepositorySpec

LLMAPI, LLMAPI_BLS = "llmapi", "llmapi_bls"
_LARGEST = 1 << 20  # bytes of a program; trtserve's own are smaller
SOURCES = Path(__file__).parents[1] / "programs"
_PROGRAMS = {
    PREPROCESSING: "preprocessing/model",
    POSTPROCESSING: "postprocessing/model",
    CORE: "core/model",
    BLS: "bls/model",
    LLMAPI: "llmapi/model",
    LLMAPI_BLS: "llmapi/bls",
}
_ENTRY = '''\
"""What Triton loads. The model is in trtserve_models, which Triton finds because this folder is on sys.path."""

import shutil
import sys
from pathlib import Path

# Leave no compiled modules in the model repository.
before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
from trtserve_models.{module} import TritonPythonModel  # noqa: E402

sys.dont_write_bytecode = before
shutil.rmtree(Path(__file__).parent / "__pycache__", ignore_errors=True)

__all__ = ["TritonPythonModel"]
'''


@cache
def program_files(model: str) -> dict[str, bytes]:
    """Path below the version folder → content, for every file of the program of `model`, or empty for the ensemble."""
    if model == ENSEMBLE:
        return {}
    program = _PROGRAMS[model]
    files = {"model.py": _ENTRY.format(module=program.replace("/", ".")).encode()}
    waiting = [PurePosixPath(f"{program}.py")]
    while waiting:
        module = waiting.pop()
        if f"{PACKAGE}/{module}" in files:
            continue
        content = (SOURCES / module).read_bytes()
        files[f"{PACKAGE}/{module}"] = content
        waiting += [folder / "__init__.py" for folder in module.parents]
        waiting += imported_modules(module, content.decode())
    return dict(sorted(files.items()))


def imported_modules(module: PurePosixPath, source: str) -> list[PurePosixPath]:
    """Files that `module` imports by relative imports, as paths like its own."""
    return [
        module.parents[node.level - 1] / f"{node.module.replace('.', '/')}.py"
        for node in import_statements(source)
        if isinstance(node, ast.ImportFrom) and node.level and node.module
    ]


@lru_cache(maxsize=512)
def import_statements(source: str) -> Sequence[ast.Import | ast.ImportFrom]:
    """Return the imports of a program, those in its functions too. Raises SyntaxError or ValueError.

    Only statements are looked at: `ast.walk` would come to ten times as many expressions.
    """
    statements: list[ast.AST] = [*ast.parse(source).body]
    for each in statements:
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements += getattr(each, part, ())
    return [each for each in statements if isinstance(each, ast.Import | ast.ImportFrom)]


def program_digest(models: Iterable[str]) -> str:
    """Hash of the programs of `models`, for fingerprints."""
    digest = hashlib.sha256()
    for model in models:
        for name, content in program_files(model).items():
            digest.update(f"{model}/{name} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def write_program(folder: Path, model: str) -> None:
    folder.mkdir(parents=True)
    for name, content in program_files(model).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def foreign_programs(repository: Path) -> list[str]:
    """Return the programs and libraries in the models of a repository that this version of trtserve did not write.

    Triton runs them as the user who starts it.
    """
    own = {(name, content) for model in _PROGRAMS for name, content in program_files(model).items()}
    return sorted(
        str(path.relative_to(repository))
        for config in repository.glob("*/config.pbtxt")
        for path in config.parent.rglob("*")
        if (path.suffix in (".py", ".sh") or ".so" in path.suffixes)
        and path.is_file()
        and (
            path.stat().st_size > _LARGEST
            # An own program has its name below the version's folder.
            or (PurePosixPath(*path.relative_to(config.parent).parts[1:]).as_posix(), path.read_bytes()) not in own
        )
    )


def warning_of_programs(repository: Path) -> str | None:
    """Return what a user should know before serving a repository from someone else, or None."""
    found = foreign_programs(repository)
    if not found:
        return None
    shown = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return (
        f"A repository is a program that runs as you: this version of trtserve did not write {shown}. "
        "Serve one from someone else only if you trust it."
    )


def require_program(folder: Path, config: Any) -> None:
    """Raise RepositoryError for a Python model without its program: Triton 2.51 would wait forever for its stub."""
    if config.backend != "python":
        return
    file = config.default_model_filename or "model.py"
    versions = [path for path in folder.iterdir() if path.is_dir() and whole_number(path.name) is not None]
    lacking = next((path for path in versions if not (path / file).exists()), None)
    if lacking is not None or not versions:
        raise RepositoryError(
            f"The model {folder.name} has no {(lacking or folder / '1') / file}.",
            hint="Make the repository again, or put the file there.",
        )


def write_model(folder: Path, template: str, table: Profile, options: ConfigOptions, *, embedded: bool) -> None:
    """Write the new folder of a model, named like the folder and otherwise like the model `template`."""
    version = folder / VERSION
    write_program(version, template)
    text = config_text(table, template, options, name=folder.name)
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
    if template == ENSEMBLE:
        # Tools that drop empty folders would make Triton refuse the model.
        (version / ".tmp").touch()
    if embedded and (classes := classes_json(template, table.release)):
        (version / CLASSES_FILE).write_text(classes, encoding="utf-8")


VERSION = "1"
PACKAGE = "trtserve_models"  # name of the copied package with a model's program, in the version folder of each model

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

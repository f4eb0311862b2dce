"""The model repository that a name or a path on the command line means, and the files outside it that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from trtserve.artifacts import Model, ModelRepository, load_artifact
from trtserve.errors import ModelNotFoundError, RepositoryError, UsageError
from trtserve.files import read_text
from trtserve.nvidia.containers import is_tag, known_container
from trtserve.progress import Progress
from trtserve.repository.check import require_sound
from trtserve.repository.served import ServedRepository
from trtserve.specs import ServerSpec
from trtserve.specs.command_line import import_command
from trtserve.store import NameRecord, Store
from trtserve.store.sources import import_words, is_folder_source

_VERSION = ("trtllm_version",)
_STRING = re.compile(r"""string_value:\s*["'](/[^"']+)["']""")
_YAML = re.compile(r"""^(?:model|tokenizer):\s*["']?(/[^"'\s#]+)""", re.MULTILINE)
_JSON = re.compile(r'[{,]\s*"[^"]*":\s*"(/[^"]+)"')
_PATH_IN_FLAG = re.compile(r"(?<![^=:,\s])/[^=:,\s]+")


def find_repository(
    name: str | None = None, *, path: Path | None = None, store: Store | None = None
) -> ModelRepository:
    """Return the model repository at `path`, or of the import or repository `name`, or of the last import.

    Raises ModelNotFoundError when nothing was imported or made (under that name).
    """
    if path is not None:
        if name is not None:
            raise UsageError(f"Both a name ({name}) and --model-repository were given; give one.")
        return load_artifact(ModelRepository, path)
    store = store or Store()
    records = store.recorded()
    chosen = [record for record in records if name is None or record.name == name]
    if chosen:
        return load_artifact(ModelRepository, Path(chosen[0].repository))
    made = store.by_name(ModelRepository)
    if name in made:
        return load_artifact(ModelRepository, made[name].path)
    downloaded = store.by_name(Model).get(name or "")
    if downloaded is not None:
        raise _only_downloaded(downloaded)
    if name is not None and is_folder_source(name):
        # A Hugging Face folder has a config.json, a model repository does not.
        if (Path(name) / "config.json").is_file():
            hint = f"Import the model first: trtserve import {name}"
        else:
            hint = f"Serve a model repository by its path: trtserve start --model-repository {name}"
        raise ModelNotFoundError(f"{name} is a path, not the name of an import.", hint=hint)
    imported = [record.name for record in records]
    others = sorted(set(made) - set(imported))
    lists = [f"Imported: {', '.join(imported)}."] if imported else []
    lists += [f"Made by `trtserve repo`: {', '.join(others)}."] if others else []
    if name is None:
        hint = " ".join(lists) or "Import a model: trtserve import demo"
        raise ModelNotFoundError("Nothing has been imported yet.", hint=hint)
    words, served = import_words(name)
    if words == name:
        then = "" if served == name else f", then trtserve start {served}"
        raise ModelNotFoundError(
            f"{name} has not been imported yet.", hint=f"Import it first: trtserve import {name}{then}"
        )
    lists.append(f"To make it: trtserve import {words}")
    raise ModelNotFoundError(f"Nothing was imported under the name {name}.", hint=" ".join(lists))


def chosen_by(repository: Path, store: Store) -> str:
    """Return the words that choose this repository on the command line: its import's name, else its path."""
    record = _record(repository, store)
    return f"--model-repository {repository}" if record is None else record.name


def import_again(repository: Path, store: Store) -> str | None:
    """Return the command that makes an import's repository again, under the same name.

    Returns None for a repository that no import made, and for one that several imports made together.
    """
    together = sum(Path(record.repository) == repository for record in store.recorded()) > 1
    record = None if together else _record(repository, store)
    # The new one is for another TensorRT-LLM.
    return None if record is None else import_command(record.name, record.source, record.spec, without=_VERSION)


def _record(repository: Path, store: Store) -> NameRecord | None:
    return next((record for record in store.recorded() if Path(record.repository) == repository), None)


def _only_downloaded(model: Model) -> ModelNotFoundError:
    source = model.name if model.manifest is None else str(model.manifest.spec.get("source", model.name))
    named = "" if source == model.name else f" --name {model.name}"
    return ModelNotFoundError(
        f"{model.name} was only downloaded; it has no model repository yet.",
        hint=f"Import it: trtserve import {source}{named}",
    )


def named_paths(repository: Path) -> tuple[Path, ...]:
    """Return the absolute paths in the configurations that exist here and are outside the repository, each once."""
    return tuple(path for path in _outside(repository) if path.exists())


def engine_paths(repository: Path, served: ServedRepository) -> tuple[Path, ...]:
    """Return the paths outside the repository that its core models need: named files and engine folders."""
    return named_paths(repository) + tuple(core.engine for core in served.core_models if core.engine)


def hub_cache() -> Path | None:
    """Return the folder of the Hugging Face hub's downloads, for models named by their id, or None if there is none."""
    folder = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return folder if folder.is_dir() else None


def require_sound_files(
    repository: ModelRepository, spec: ServerSpec, progress: Progress, *, volume: Path | None = None
) -> None:
    """Raise RepositoryError for faults that keep Triton from starting.

    A `volume`, mounts in docker flags, and a user's own image may have files that are not on this machine. Where the
    repository names such a file the check would be a guess, so a warning replaces it.
    """
    folders = [Path(text) for flag in spec.container_flags for text in _PATH_IN_FLAG.findall(flag)]
    if volume is not None:
        folders.append(volume)
    if spec.container is not None and not is_tag(spec.container) and known_container(spec.container) is None:
        folders = [Path("/")]
    hidden = next((path for path in _missing(repository) if any(path.is_relative_to(each) for each in folders)), None)
    if hidden is None:
        require_sound(repository, progress)
    else:
        progress.warn(
            f"The repository names {hidden}, which is not on this machine: its files are not checked before the start. "
            "Run `trtserve check` where that file exists."
        )


def _missing(repository: ModelRepository) -> Iterator[Path]:
    """Yield named files that are not on this machine, except for those in the repository under another path."""
    facts = repository.manifest.facts if repository.manifest is not None else {}
    members = [facts, *(entry["facts"] for entry in (facts.get("members") or {}).values())]
    inside = [Path(each["container_paths"]) for each in members if each.get("container_paths")]
    for path in _outside(repository.path):
        if not path.exists() and not any(path.is_relative_to(each) for each in inside):
            yield path


def _outside(repository: Path) -> Iterator[Path]:
    texts = [(path, _STRING) for path in repository.glob("*/config.pbtxt")]
    texts += [(path, _YAML) for path in repository.glob("*/1/model.yaml")]
    texts += [(path, _JSON) for name in ("model", "multi_lora") for path in repository.glob(f"*/1/{name}.json")]
    named = (Path(text) for path, pattern in texts for text in pattern.findall(read_text(path, RepositoryError)))
    # Files of the image keep their meaning there, even where this machine has them too.
    own = (repository.absolute(), Path("/opt/tritonserver"))
    yield from dict.fromkeys(path for path in named if not any(path.is_relative_to(folder) for folder in own))

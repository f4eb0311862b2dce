"""Which model repository a name or a path on the command line means."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from trtserve.artifacts import Model, ModelRepository, load_artifact
from trtserve.errors import ModelNotFoundError, UsageError
from trtserve.store import NameRecord, Store
from trtserve.wording import import_command

_VERSION = ("trtllm_version",)


def find_repository(
    name: str | None = None, *, path: Path | None = None, store: Store | None = None
) -> ModelRepository:
    """The model repository at `path`, or of the import or repository `name`, or of the last import.

    ModelNotFoundError when nothing was imported or made (under that name).
    """
    if path is not None:
        if name is not None:
            raise UsageError(f"Both a name ({name}) and --model-repository were given; give one.")
        return _open(path)
    store = store or Store()
    records = store.recorded()
    chosen = [record for record in records if name is None or record.name == name]
    if chosen:
        return _open(Path(chosen[0].repository))
    made = store.made(ModelRepository)
    if name in made:
        return _open(made[name].path)
    downloaded = store.made(Model).get(name or "")
    if downloaded is not None:
        raise _only_downloaded(downloaded)
    if name is not None and (os.sep in name or Path(name).is_dir()):
        raise _folder_for_name(name)
    what = "Nothing has been imported yet." if name is None else f"Nothing was imported under the name {name}."
    raise ModelNotFoundError(what, hint=_known_names([record.name for record in records], made))


def chosen_by(repository: Path, store: Store) -> str:
    """What names this repository on the command line: its import, else its path."""
    record = _record(repository, store)
    return f"--model-repository {repository}" if record is None else record.name


def import_again(repository: Path, store: Store) -> str | None:
    """The command that makes an import's repository again, whose name then leads to the new one; None for others.

    A repository that several imports made together is one of the others.
    """
    together = sum(Path(record.repository) == repository for record in store.recorded()) > 1
    record = None if together else _record(repository, store)
    # The version is to be another one.
    return None if record is None else import_command(record.name, record.source, record.spec, without=_VERSION)


def _record(repository: Path, store: Store) -> NameRecord | None:
    return next((record for record in store.recorded() if Path(record.repository) == repository), None)


def _known_names(imported: list[str], made: Collection[str]) -> str:
    others = sorted(set(made) - set(imported))
    known = [f"Imported: {', '.join(imported)}."] if imported else []
    known += [f"Made by `trtserve repo`: {', '.join(others)}."] if others else []
    return " ".join(known) or "Import a model: trtserve import demo"


def _folder_for_name(folder: str) -> ModelNotFoundError:
    """A path where the name of an import is expected; a Hugging Face folder has a config.json, a repository has not."""
    if (Path(folder) / "config.json").is_file():
        hint = f"Import the model first: trtserve import {folder}"
    else:
        hint = f"Serve a model repository by its path: trtserve start --model-repository {folder}"
    return ModelNotFoundError(f"{folder} is a path, not the name of an import.", hint=hint)


def _only_downloaded(model: Model) -> ModelNotFoundError:
    """A name of `import --download-only`, with the import that makes the rest."""
    source = model.name if model.manifest is None else str(model.manifest.spec.get("source", model.name))
    named = "" if source == model.name else f" --name {model.name}"
    return ModelNotFoundError(
        f"{model.name} was only downloaded; it has no model repository yet.",
        hint=f"Import it: trtserve import {source}{named}",
    )


def _open(path: Path) -> ModelRepository:
    repository = load_artifact(ModelRepository, path)
    return ModelRepository(path=repository.path, manifest=repository.manifest)

"""Whether the files of a repository, and of engines that it names, are as they were when they were made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from trtserve.artifacts import (
    Artifact,
    Engine,
    ModelRepository,
    load_artifact,
)
from trtserve.errors import ArtifactError, CorruptFileError, listing
from trtserve.progress import Progress
from trtserve.repository.check.findings import Finding, Rule
from trtserve.repository.check.repository import Repository
from trtserve.specs.command_line import import_command
from trtserve.store import Store, remembered_checksums
from trtserve.store.integrity import Checksums, damages


def damaged_contents(repository: Repository) -> Iterator[Finding]:
    """Compare every byte, also of files that were compared before."""
    for artifact in _artifacts(repository.path, (model.engine_folder for model in repository.models.values())):
        for path, what in damages(artifact, Checksums()).items():
            inside = path.is_relative_to(repository.path)
            name = path.relative_to(repository.path).parts[0] if inside else None
            yield Finding(model=name, file=path, what=f"{path.name} {what}.", fix=_repair(artifact))


def require_intact(repository: Path, engines: Iterable[Path | None], progress: Progress) -> None:
    """Raise CorruptFileError when a file is not as it was when the repository or one of its engines was made.

    A file that was compared before is read again only when its size, time of change or inode differ.
    """
    for artifact in _artifacts(repository, engines):
        if artifact.manifest is not None and artifact.manifest.files:
            progress.step(f"Comparing the files of {artifact.path.name} with their checksums")
        if found := damages(artifact, remembered_checksums()):
            raise CorruptFileError(
                f"{artifact.path} is damaged: "
                + listing([f"{path.relative_to(artifact.path)} {what}" for path, what in found.items()], "; ")
                + ".",
                hint=f"{_repair(artifact)} To serve it as it is: --no-verify",
            )


def _artifacts(repository: Path, engines: Iterable[Path | None]) -> Iterator[Artifact]:
    """Yield the repository and the engines outside of it."""
    outside = {path.absolute() for path in engines if path is not None and path.is_dir()}
    yield load_artifact(ModelRepository, repository)
    for path in sorted(outside):
        if not path.is_relative_to(repository.absolute()):
            try:
                yield load_artifact(Engine, path)
            except ArtifactError:  # other rules say what is wrong with this folder
                continue


def _repair(artifact: Artifact) -> str:
    """Return how to make an artefact again; `import` replaces damaged artefacts, also the engine it was linked from."""
    for record in Store().recorded():
        if str(artifact.path) in (record.repository, record.engine):
            return f"Repair it: {import_command(record.name, record.source, record.spec)}"
    command = "trtserve repo" if isinstance(artifact, ModelRepository) else "trtserve build"
    return f"Make it again with `{command}`: a damaged artefact is not reused."


RULES = (Rule("file-content", damaged_contents, "files are as they were when they were made", needs="contents"),)

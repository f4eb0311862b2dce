"""Where artefacts live, and how they get there: staged beside their place, manifest last, one rename, under a lock.

$TRTSERVE_HOME (else $XDG_CACHE_HOME/trtserve, else ~/.cache/trtserve)
├── models/ checkpoints/ engines/ repositories/ adapters/     <name>-<first 12 digits of the fingerprint>/
├── names/<name>.json                               what `import` made under that name
├── servers/<name>.json  servers/<name>.log         running servers
└── locks/
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from trtserve.artifacts import (
    KINDS,
    MANIFEST,
    Adapter,
    Artifact,
    Checkpoint,
    Engine,
    Manifest,
    Model,
    ModelRepository,
    load_artifact,
    looks_like,
)
from trtserve.errors import (
    ArtifactError,
    ModelNotFoundError,
    UsageError,
    listing,
)
from trtserve.files import locked, read_json_object, write_json, writing
from trtserve.progress import SILENT, Progress

A = TypeVar("A", bound=Artifact)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# Ends of the hidden names beside an artefact: of the one that is being made, and of the one that gives way to it.
_STAGED = ".partial"
_REPLACED = ".old"

_FOLDERS: dict[type[Artifact], str] = {
    Model: "models",
    Checkpoint: "checkpoints",
    Engine: "engines",
    ModelRepository: "repositories",
    Adapter: "adapters",
}


_MADE_BY: dict[type[Artifact], str] = {
    Model: "import {name}",
    Checkpoint: "convert MODEL",
    Engine: "build CHECKPOINT",
    ModelRepository: "import MODEL",
    Adapter: "lora ADAPTER",
}


def publish(kind: type[A], destination: Path, manifest: Manifest, produce: Callable[[Path], Manifest | None]) -> A:
    """Make the artefact at `destination`, or reuse the one there when its fingerprint is equal.

    `produce` fills a staging folder, a sibling of the destination, and may return a manifest with more facts.
    An artefact of the same kind and another fingerprint at `destination` is replaced, anything else there is refused.
    What lies beside it under another name with the same fingerprint is linked instead of being made again.
    DiskSpaceError or ArtifactError when the file system refuses.
    """
    with writing(destination):
        destination = _target(destination)
    with writing(destination), locked(artifact_lock(destination)):
        staging = destination.parent / f".{destination.name}{_STAGED}"
        _recover(staging, destination)
        existing = reusable(kind, destination, manifest.fingerprint)
        if existing is not None:
            return existing
        try:
            staging.mkdir()
            twin = _twin(destination, manifest)
            final = (produce(staging) or manifest) if twin is None else _link_twin(twin, staging, manifest)
            final.write(staging)
            _swap(staging, destination)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return kind(path=destination, manifest=final)


def artifact_lock(folder: Path) -> Path:
    """The lock of whoever makes or removes an artefact; `folder` is its place, or what a killed process left there."""
    name = folder.name
    if name.startswith("."):
        name = name.removeprefix(".").removesuffix(_STAGED).removesuffix(_REPLACED)
    return folder.parent / f".{name}.lock"


def _target(destination: Path) -> Path:
    """The place that is replaced: where a link leads, so that the link stays one."""
    return Path(os.path.realpath(destination)) if destination.is_symlink() else destination.absolute()


def reusable(kind: type[A], destination: Path, wanted: str) -> A | None:
    """The complete artefact at `destination` if its fingerprint is `wanted`; None when it can be made there.

    ArtifactError when something lies there that must not be replaced: no artefact, or one of another kind.
    """
    with writing(destination):
        if not (destination / MANIFEST).exists():
            _require_empty(destination)
            return None
    manifest = Manifest.read(destination)
    if manifest.kind != KINDS[kind]:
        raise ArtifactError(
            f"{destination} holds an artefact of kind {manifest.kind}; a {KINDS[kind]} does not replace it.",
            hint="Choose another place (--out, ENGINE_DEST_PATH), or remove the folder.",
        )
    return kind(path=destination, manifest=manifest) if manifest.fingerprint == wanted else None


def _require_empty(destination: Path) -> None:
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ArtifactError(
            f"{destination} exists and was not made by trtserve; it is left alone.",
            hint="Choose another place (--out, ENGINE_DEST_PATH), or remove what lies there.",
        )


def _twin(destination: Path, manifest: Manifest) -> Path | None:
    """A folder of the store, beside `destination`, that holds the same under another name."""
    for path in sorted(destination.parent.glob(f"[!.]*-{manifest.fingerprint[:12]}")):
        with suppress(ArtifactError):
            other = Manifest.read(path)
            if (other.kind, other.fingerprint) == (manifest.kind, manifest.fingerprint):
                return path
    return None


def _link_twin(twin: Path, staging: Path, manifest: Manifest) -> Manifest:
    """Fill `staging` with links to the files of `twin`; the manifest gets the facts that were learned there."""
    for path in sorted(twin.rglob("*")):
        target = staging / path.relative_to(twin)
        if path.is_symlink():
            target.symlink_to(path.readlink())
        elif path.is_file() and target != staging / MANIFEST:
            link_or_copy(path, target)
    return replace(manifest, facts={**Manifest.read(twin).facts, **manifest.facts})


def _old(destination: Path) -> Path:
    return destination.parent / f".{destination.name}{_REPLACED}"


def _recover(staging: Path, destination: Path) -> None:
    """Remove what a killed process left beside `destination`; what it was about to replace goes back to its place."""
    old = _old(destination)
    if old.exists() and not destination.exists():
        old.rename(destination)
    for leftover in (staging, old):
        shutil.rmtree(leftover, ignore_errors=True)


def _swap(staging: Path, destination: Path) -> None:
    """Put `staging` in the place of `destination`; a reader never sees a mixture.

    Between the two renames there is no folder: a rename cannot replace one that has files in it.
    """
    if not destination.exists():
        staging.rename(destination)
        return
    old = _old(destination)
    destination.rename(old)
    staging.rename(destination)
    shutil.rmtree(old)


def link_or_copy(source: Path, target: Path, *, copy: bool = False) -> None:
    """Hard-link `source` to `target`; copied across file systems, or when `copy` is set."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not copy:
        try:
            os.link(source, target)
        except OSError:
            pass
        else:
            return
    shutil.copy2(source, target)


@dataclass(frozen=True, kw_only=True)
class NameRecord:
    """What `import` made under a name: absolute paths of its artefacts, and what it was asked for (JSON)."""

    name: str
    source: str
    model: str
    checkpoint: str
    engine: str
    repository: str
    imported: str
    spec: dict[str, Any] = field(default_factory=dict)


def require_name(name: str) -> None:
    """UsageError for what cannot name an artefact."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name an artefact.", hint="Use letters, digits, '.', '_' and '-': --name NAME"
        )


class Store:
    """The folder of all artefacts of a user."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root if root is not None else default_root()).absolute()

    def destination(self, kind: type[Artifact], name: str, fingerprint: str) -> Path:
        """Place of the artefact of `kind`; UsageError for a name that is no folder name."""
        require_name(name)
        return self.root / _FOLDERS[kind] / f"{name}-{fingerprint[:12]}"

    def folder(self, kind: type[Artifact]) -> Path:
        """Folder of all artefacts of `kind`."""
        return self.root / _FOLDERS[kind]

    def find(self, kind: type[A], text: str, *, progress: Progress = SILENT) -> A:
        """The artefact of `kind` in the folder `text`, else the one that `import` recorded under that name, else the
        newest that was made under it; ModelNotFoundError, with close names, when there is none.

        A folder of another kind gives way to a name of the same spelling; `progress` hears which of two was taken.
        """
        folder = Path(text).expanduser()
        # Of a path nobody would say that it is a name.
        made = {} if folder.is_dir() and folder.name != text else self.made(kind)
        if folder.is_dir() and (text not in made or looks_like(kind, folder)):
            if text in made:
                progress.warn(
                    f"The folder {folder.absolute()} is used for {text}; {made[text].path} has that name too."
                )
            return kind(path=folder.absolute(), manifest=load_artifact(kind, folder).manifest)
        if folder.is_dir():
            progress.warn(f"The folder {folder.absolute()} is no {KINDS[kind]}; {made[text].path} is used for {text}.")
        if text in made:
            return made[text]
        raise self.unfound(text, kind)

    def unfound(self, text: str, *kinds: type[Artifact]) -> ModelNotFoundError:
        """What is to be said where `text` is no folder, and no name of an artefact of one of `kinds`."""
        nouns = " or ".join(_article(KINDS[kind]) for kind in kinds)
        made = sorted({name for kind in kinds for name in self.made(kind)})
        if text.startswith(("/", ".", "~")) or text.endswith("/"):
            return ModelNotFoundError(
                f"{text} is not a folder on this machine.",
                hint=f"Give the folder of {nouns}, or the name of one made here: {listing(made) or 'there is none'}.",
            )
        close = difflib.get_close_matches(text, made, n=3, cutoff=0.5)
        known = f"Did you mean {' or '.join(close)}?" if close else f"Names here: {', '.join(made) or 'none'}."
        commands = (f"trtserve {_MADE_BY[kind].format(name=text)}" for kind in kinds)
        return ModelNotFoundError(
            f"{text} is neither a folder nor the name of {nouns} that was made here.",
            hint=f"{known} To make one: {', '.join(commands)}",
        )

    def made(self, kind: type[A]) -> dict[str, A]:
        """Complete artefacts of `kind` by name: the recorded one of each name, else the newest."""
        made = {artefact.name: artefact for artefact in sorted(self.complete(kind), key=_created)}
        for record in self.recorded():
            path = Path(getattr(record, KINDS[kind], ""))  # an import makes no adapter
            if path.is_absolute():
                with suppress(ArtifactError):
                    made[record.name] = kind(path=path, manifest=load_artifact(kind, path).manifest)
        return made

    def complete(self, kind: type[A]) -> Iterator[A]:
        """Artefacts of `kind` that are whole, in the order of their folders' names, older builds included."""
        # Hidden are those that are being made, replaced or removed.
        for path in sorted(self.folder(kind).glob(f"[!.]*/{MANIFEST}")):
            with suppress(ArtifactError):
                yield kind(path=path.parent, manifest=Manifest.read(path.parent))

    @property
    def downloads(self) -> Path:
        """Folder of the files of the hub's revisions that are not all here yet."""
        return self.root / "downloads"

    def download(self, repository: str, commit: str) -> Path:
        """Folder where the files of a revision gather until all are there; it outlives a killed process."""
        return self.downloads / f"{repository.replace('/', '--')}-{commit[:12]}"

    def lock_of(self, folder: Path) -> Path:
        """The lock file that is held while `folder`, an artefact's or a download's, is filled or removed."""
        if folder.parent == self.downloads:
            return self.root / "locks" / f"{folder.name}.lock"
        return artifact_lock(folder)

    @property
    def servers(self) -> Path:
        """Folder of state files and logs of servers."""
        return self.root / "servers"

    @property
    def names(self) -> Path:
        """Folder of the records of imported names."""
        return self.root / "names"

    def record(self, record: NameRecord) -> None:
        """Remember what was imported under a name; the newest record is the default of `start`."""
        write_json(self.names / f"{record.name}.json", record.__dict__)

    def recorded(self) -> list[NameRecord]:
        """All imported names, newest first."""
        records = (_read_record(path) for path in self.names.glob("[!.]*.json"))
        return sorted(filter(None, records), key=lambda record: record.imported, reverse=True)


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _created(artefact: Artifact) -> str:
    return artefact.manifest.created if artefact.manifest is not None else ""


def _read_record(path: Path) -> NameRecord | None:
    """The record at `path`; None where a `trtserve remove` was faster."""
    again = "Remove the file and import again."
    try:
        return NameRecord(**read_json_object(path, hint=again))
    except FileNotFoundError:
        return None
    except TypeError as error:
        raise ArtifactError(f"{path} cannot be read as the record of an import: {error}.", hint=again) from error


def default_root() -> Path:
    """$TRTSERVE_HOME, else $XDG_CACHE_HOME/trtserve, else ~/.cache/trtserve."""
    if home := os.environ.get("TRTSERVE_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "trtserve"

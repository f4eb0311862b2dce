"""Where artefacts live, and how they get there: staged beside their place, manifest last, one rename, under a lock.

$TRTSERVE_HOME (else $XDG_CACHE_HOME/trtserve, else ~/.cache/trtserve)
├── models/ checkpoints/ engines/ repositories/     <name>-<first 12 digits of the fingerprint>/
├── names/<name>.json                               what `import` made under that name
├── servers/<name>.json  servers/<name>.log         running servers
└── locks/
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trtserve.artifacts import MANIFEST, Artifact, Checkpoint, Engine, Manifest, Model, ModelRepository
from trtserve.errors import ArtifactError, LockedError, UsageError

A = TypeVar("A", bound=Artifact)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_FOLDERS: dict[type[Artifact], str] = {
    Model: "models",
    Checkpoint: "checkpoints",
    Engine: "engines",
    ModelRepository: "repositories",
}


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the advisory lock file `path`; LockedError when it is taken and `wait` is False."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise LockedError(
                f"Another trtserve process is working on {path.stem}.", hint="Wait for it to end, then try again."
            ) from None
        yield


def write_json(path: Path, content: object) -> None:
    """Replace `path` by `content` in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    staged.replace(path)


def publish(kind: type[A], destination: Path, manifest: Manifest, produce: Callable[[Path], Manifest | None]) -> A:
    """Make the artefact at `destination`, or reuse the one there when its fingerprint is equal.

    `produce` fills a staging folder, a sibling of the destination, and may return a manifest with more facts.
    An artefact of another fingerprint at `destination` is replaced; a folder that is no artefact is refused.
    """
    destination = destination.absolute()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with locked(destination.parent / f".{destination.name}.lock"):
        existing = reusable(kind, destination, manifest.fingerprint)
        if existing is not None:
            return existing
        _refuse_foreign(destination)
        staging = destination.parent / f".{destination.name}.partial"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        try:
            final = produce(staging) or manifest
            final.write(staging)
            _swap(staging, destination)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return kind(path=destination, manifest=final)


def reusable(kind: type[A], destination: Path, wanted: str) -> A | None:
    """The complete artefact at `destination` if its fingerprint is `wanted`."""
    if not (destination / MANIFEST).exists():
        return None
    manifest = Manifest.read(destination)
    return kind(path=destination, manifest=manifest) if manifest.fingerprint == wanted else None


def _refuse_foreign(destination: Path) -> None:
    if destination.exists() and not (destination / MANIFEST).exists() and any(destination.iterdir()):
        raise ArtifactError(
            f"{destination} exists and was not made by trtserve; it is left alone.",
            hint="Choose another --out, or remove the folder.",
        )


def _swap(staging: Path, destination: Path) -> None:
    """Put `staging` in the place of `destination`; a reader sees the old or the new folder, never a mixture."""
    if not destination.exists():
        staging.rename(destination)
        return
    old = destination.parent / f".{destination.name}.old"
    shutil.rmtree(old, ignore_errors=True)
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
    """What `import` made under a name: absolute paths of its artefacts."""

    name: str
    source: str
    model: str
    checkpoint: str
    engine: str
    repository: str
    imported: str


class Store:
    """The folder of all artefacts of a user."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root if root is not None else default_root()).absolute()

    def destination(self, kind: type[Artifact], name: str, fingerprint: str) -> Path:
        """Place of the artefact of `kind`; UsageError for a name that is no folder name."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot name an artefact.", hint="Use letters, digits, '.', '_' and '-': --name NAME"
            )
        return self.root / _FOLDERS[kind] / f"{name}-{fingerprint[:12]}"

    def folder(self, kind: type[Artifact]) -> Path:
        """Folder of all artefacts of `kind`."""
        return self.root / _FOLDERS[kind]

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
        records = [_read_record(path) for path in self.names.glob("*.json") if not path.name.startswith(".")]
        return sorted(records, key=lambda record: record.imported, reverse=True)


def _read_record(path: Path) -> NameRecord:
    try:
        return NameRecord(**json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, TypeError) as error:
        raise ArtifactError(
            f"{path} cannot be read as the record of an import: {error}.", hint="Remove the file and import again."
        ) from error


def default_root() -> Path:
    """$TRTSERVE_HOME, else $XDG_CACHE_HOME/trtserve, else ~/.cache/trtserve."""
    if home := os.environ.get("TRTSERVE_HOME"):
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache).expanduser() if cache else Path.home() / ".cache") / "trtserve"
